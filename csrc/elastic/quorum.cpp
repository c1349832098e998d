#include "elastic/quorum.h"

#include <algorithm>

namespace torchft_ext {

MemberId proposerInTurn(const std::vector<MemberId>& living, uint32_t fruitless) {
  constexpr uint32_t kFirstTries = 4;
  constexpr uint32_t kMostTries = 1024;
  // Each round gives each of them twice the time of the round before: what takes longer than a turn
  // must not be cut short for ever.
  uint32_t tries = kFirstTries;
  size_t turn = 0;
  for (uint32_t left = fruitless; left >= tries; ++turn) {
    left -= tries;
    if ((turn + 1) % living.size() == 0 && tries < kMostTries) tries *= 2;
  }
  return living[turn % living.size()];
}

std::vector<std::vector<MemberId>> acceptorSets(const View& view,
                                                const std::vector<Promotion>& promisers) {
  const std::vector<MemberId> all = idsOf(view.members);
  const auto says = [&](Promotion what) {
    return std::find(promisers.begin(), promisers.end(), what) != promisers.end();
  };
  if (says(Promotion::kYes)) return {all};
  if (says(Promotion::kNo) || view.voters.size() == all.size()) return {view.voters};
  return {view.voters, all};
}

QuorumState quorumOf(const std::vector<std::vector<MemberId>>& sets,
                     const std::set<MemberId>& voices, bool has_witness) {
  QuorumState state = QuorumState::kWhole;
  for (const std::vector<MemberId>& set : sets) {
    const auto present = static_cast<size_t>(std::count_if(
        set.begin(), set.end(), [&](const MemberId& id) { return voices.contains(id); }));
    if (2 * present > set.size()) continue;
    if (!has_witness || 2 * present < set.size() || present == 0) return QuorumState::kNone;
    state = QuorumState::kWithWitness;
  }
  return state;
}

}  // namespace torchft_ext
