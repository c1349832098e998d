#include "elastic/spread.h"

#include <algorithm>

namespace torchft_ext {

std::vector<Hop> hopsOf(const std::vector<MemberId>& ranks, const MemberId& self, bool relayed) {
  std::vector<Hop> hops;
  const size_t size = ranks.size();
  const auto found = std::find(ranks.begin(), ranks.end(), self);
  if (found == ranks.end()) return hops;
  const auto own = static_cast<size_t>(found - ranks.begin());
  for (size_t distance = 1; distance < size; distance += relayed ? distance : 1) {
    Hop hop{ranks[(own + distance) % size], {}};
    // Of more it knows already, once it has been around.
    const size_t count = relayed ? std::min(distance, size - distance) : 1;
    for (size_t back = 0; back < count; ++back) {
      hop.about.push_back(ranks[(own + size - back) % size]);
    }
    const auto longer = std::upper_bound(
        hops.begin(), hops.end(), hop,
        [](const Hop& a, const Hop& b) { return a.about.size() < b.about.size(); });
    hops.insert(longer, std::move(hop));
  }
  return hops;
}

std::vector<Hop> detoursOf(const std::set<MemberPair>& cut, const MemberId& self) {
  std::vector<Hop> hops;
  for (const auto& [one, other] : cut) {
    if (one == self || other == self) continue;
    hops.push_back({one, {other}});
    hops.push_back({other, {one}});
  }
  return hops;
}

}  // namespace torchft_ext
