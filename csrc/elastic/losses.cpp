#include "elastic/losses.h"

#include <algorithm>

namespace torchft_ext {

bool Losses::add(const MemberId& id, Loss loss) {
  const auto [known, fresh] = all_.try_emplace(id, loss);
  if (fresh) return true;
  if (isFinal(known->second) || known->second == loss) return false;
  known->second = loss;
  return true;
}

void Losses::hear(const MemberId& id) {
  const auto loss = all_.find(id);
  if (loss != all_.end() && !isFinal(loss->second)) all_.erase(loss);
}

void Losses::beginView(const View& view, const std::map<MemberId, Member>& waiting) {
  std::erase_if(all_, [&](const auto& loss) {
    if (!view.has(loss.first)) return !waiting.contains(loss.first);
    return !isFinal(loss.second) || tellsOfNextView(loss.second);
  });
}

bool Losses::isGoneForGood(const MemberId& id) const {
  const auto loss = all_.find(id);
  return loss != all_.end() && isFinal(loss->second);
}

bool Losses::hasOf(const View& view) const {
  return std::any_of(view.members.begin(), view.members.end(),
                     [&](const Member& member) { return has(member.id); });
}

std::set<MemberId> Losses::ids() const {
  std::set<MemberId> ids;
  for (const auto& [id, loss] : all_) ids.insert(id);
  return ids;
}

}  // namespace torchft_ext
