// The store of an ElasticWorld, with a register for each lineage. A value.
#pragma once

#include <cstdint>
#include <map>

#include "cpp/elastic/elastic_world_members.h"
#include "elastic/proposal.h"
#include "net/frame.h"

namespace torchft_ext {

class ElasticWorldStore {
 public:
  explicit ElasticWorldStore(const ElasticParts& parts)
      : knows_identities_(parts.witness_is_the_views) {}

  WitnessReply answer(const WitnessRequest& request);
  void restart();                   // empty
  void lose() { is_lost_ = true; }  // for good
  bool isLost() const { return is_lost_; }
  // Another one after each restart, ...
  uint8_t identity() const { return identity_; }
  // ... and to each lineage, as it is drawn at random.
  WitnessId identityTo(LineageNumber lineage) const;
  const std::map<LineageNumber, AcceptedView>& held() const { return held_; }

 private:
  bool knows_identities_;
  uint8_t identity_ = 1;
  bool is_lost_ = false;
  std::map<LineageNumber, AcceptedView> held_;
};

}  // namespace torchft_ext
