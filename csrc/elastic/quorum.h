// Who may decide on the next view. Pure functions.
#pragma once

#include <set>
#include <vector>

#include "elastic/elastic_message.h"
#include "elastic/view.h"

namespace torchft_ext {

// The sets of acceptors of which each needs a quorum, from what the promisers say of the promotion
// of their view's learners (docs/membership_protocol.md).
std::vector<std::vector<MemberId>> acceptorSets(const View& view,
                                                const std::vector<Promotion>& promisers);

enum class QuorumState {
  kNone,
  kWithWitness,  // if the witness's vote is there too
  kWhole,
};
// Of every set: more than half, or exactly half, which needs the witness.
QuorumState quorumOf(const std::vector<std::vector<MemberId>>& sets,
                     const std::set<MemberId>& voices, bool has_witness);

}  // namespace torchft_ext
