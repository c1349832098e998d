#include "elastic/sole_holders.h"

#include <utility>

namespace torchft_ext {

void SoleHolders::set(std::set<MemberId> ids, Duration patience) {
  ids_ = std::move(ids);
  patience_ = patience;
  std::erase_if(frozen_since_, [&](const auto& frozen) { return !ids_.contains(frozen.first); });
}

SoleHolders::Verdict SoleHolders::onFrozen(const MemberId& id, Clock::time_point now) {
  if (!ids_.contains(id)) return Verdict::kLost;
  const auto [frozen, fresh] = frozen_since_.try_emplace(id, now);
  if (now - frozen->second >= patience_) return Verdict::kLost;
  return fresh ? Verdict::kBegins : Verdict::kWaits;
}

std::set<MemberId> SoleHolders::awaited() const {
  std::set<MemberId> ids;
  for (const auto& [id, since] : frozen_since_) ids.insert(id);
  return ids;
}

}  // namespace torchft_ext
