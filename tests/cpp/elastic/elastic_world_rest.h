// Whether an ElasticWorld has to come to rest where nothing fails any more, and whether it has.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "cpp/elastic/elastic_world_members.h"
#include "elastic/view.h"

namespace torchft_ext {

class ElasticWorld;

class ElasticWorldRest {
 public:
  explicit ElasticWorldRest(const ElasticWorld& world) : world_(world) {}

  // In one of its lineages: of every view that may have to be taken up, do enough voters live,
  // connected?
  bool isDue() const;
  // In each lineage where it is due.
  bool isThere() const;

 private:
  std::set<LineageNumber> lineages() const;
  // For that lineage: dead, or in another one.
  bool isGoneFrom(LineageNumber lineage, int i) const;
  bool isDueIn(LineageNumber lineage) const;
  bool isThereIn(LineageNumber lineage) const;
  std::vector<View> bindingViews(LineageNumber lineage) const;
  uint64_t firstThatBinds(LineageNumber lineage) const;
  bool mayBeDecidedAfter(const View& view) const;

  const ElasticWorld& world_;
};

}  // namespace torchft_ext
