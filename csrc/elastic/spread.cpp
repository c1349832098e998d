#include "elastic/spread.h"

#include <algorithm>

namespace torchft_ext {

std::vector<Leg> legsOf(const std::vector<MemberId>& ranks, const MemberId& self, bool relayed) {
  std::vector<Leg> legs;
  const size_t size = ranks.size();
  const auto found = std::find(ranks.begin(), ranks.end(), self);
  if (found == ranks.end()) return legs;
  const auto own = static_cast<size_t>(found - ranks.begin());
  for (size_t distance = 1; distance < size; distance += relayed ? distance : 1) {
    Leg leg{ranks[(own + distance) % size], {}};
    // Of more it knows already, once it has been around.
    const size_t count = relayed ? std::min(distance, size - distance) : 1;
    for (size_t back = 0; back < count; ++back) {
      leg.about.push_back(ranks[(own + size - back) % size]);
    }
    const auto longer = std::upper_bound(
        legs.begin(), legs.end(), leg,
        [](const Leg& a, const Leg& b) { return a.about.size() < b.about.size(); });
    legs.insert(longer, std::move(leg));
  }
  return legs;
}

std::vector<Leg> detoursOf(const std::set<MemberPair>& cut, const MemberId& self) {
  std::vector<Leg> legs;
  for (const auto& [one, other] : cut) {
    if (one == self || other == self) continue;
    legs.push_back({one, {other}});
    legs.push_back({other, {one}});
  }
  return legs;
}

}  // namespace torchft_ext
