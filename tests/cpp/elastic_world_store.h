// The store of an ElasticWorld: the witness, or what decides by the store's rule. A value.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "elastic/proposal.h"
#include "net/frame.h"

namespace torchft_ext {

class ElasticWorldStore {
 public:
  ElasticWorldStore(bool store_rule, const ElasticParts& parts)
      : store_rule_(store_rule), witness_is_the_views_(parts.witness_is_the_views) {}

  WitnessReply answer(const WitnessRequest& request);
  uint8_t identity() const { return identity_; }
  void restart();  // empty
  void lose() { lost_ = true; }
  bool lost() const { return lost_; }
  // That it holds: they may have to be taken up.
  std::vector<View> binding() const;

  void write(ByteWriter& writer) const;  // equal where the values are

 private:
  bool store_rule_;
  bool witness_is_the_views_;
  uint8_t identity_ = 1;
  bool lost_ = false;
  std::optional<AcceptedView> held_;  // by the witness
  std::map<uint64_t, View> decided_;  // by the store's rule
};

}  // namespace torchft_ext
