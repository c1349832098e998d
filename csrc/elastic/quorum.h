// Who may propose the next view, and decide on it. Pure functions.
#pragma once

#include <set>
#include <vector>

#include "elastic/elastic_message.h"
#include "elastic/view.h"

namespace torchft_ext {

// Of the living members in the order of their ranks (one at least), after so many tries without a
// new view. The lowest first; where that comes to nothing the others in turn, as it may be cut off
// from the witness, or from somebody whom others reach.
MemberId proposerInTurn(const std::vector<MemberId>& living, uint32_t fruitless);

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
