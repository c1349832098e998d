#include "elastic/sole_holders.h"

#include <utility>

namespace torchft_ext {

void SoleHolders::set(std::set<MemberId> ids, Duration patience) {
  ids_ = std::move(ids);
  all_ = false;
  patience_ = patience;
  std::erase_if(frozen_since_, [&](const auto& frozen) { return !has(frozen.first); });
}

void SoleHolders::beginView() {
  all_ = patience_ > Duration::zero();
  frozen_since_.clear();
}

bool SoleHolders::has(const MemberId& id) const {
  return all_ || ids_.contains(id);
}

SoleHolders::Verdict SoleHolders::onFrozen(const MemberId& id, Clock::time_point now) {
  if (!has(id)) return Verdict::kLost;
  const auto [frozen, fresh] = frozen_since_.try_emplace(id, now);
  if (now - frozen->second >= patience_) return Verdict::kLost;
  return fresh ? Verdict::kBegins : Verdict::kWaits;
}

std::set<MemberId> SoleHolders::awaited() const {
  std::set<MemberId> ids;
  for (const auto& [id, since] : frozen_since_) ids.insert(id);
  return ids;
}

std::set<MemberId> SoleHolders::expired(Clock::time_point now) const {
  std::set<MemberId> ids;
  for (const auto& [id, since] : frozen_since_) {
    if (now - since >= patience_) ids.insert(id);
  }
  return ids;
}

}  // namespace torchft_ext
