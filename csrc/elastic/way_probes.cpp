#include "elastic/way_probes.h"

namespace torchft_ext {

std::vector<MemberId> WayProbes::unreached() const {
  std::vector<MemberId> ids;
  for (const MemberId& id : targets_) {
    if (!reached_.contains(id)) ids.push_back(id);
  }
  return ids;
}

std::vector<MemberId> WayProbes::due(Clock::time_point now) const {
  std::vector<MemberId> ids = unreached();
  std::erase_if(ids, [&](const MemberId& id) {
    const auto sent = sent_at_.find(id);
    return sent != sent_at_.end() && now - sent->second < kAgain;
  });
  return ids;
}

bool WayProbes::lose(const MemberId& id) {
  sent_at_.erase(id);
  return reached_.erase(id) > 0;
}

}  // namespace torchft_ext
