#include "elastic/standstill.h"

#include <algorithm>
#include <utility>

namespace torchft_ext {

void Standstill::add(const View& view, std::string cause, bool is_consequence) {
  std::vector<MemberId> members = idsOf(view.members);
  std::sort(members.begin(), members.end());
  if (members != members_) {
    members_ = std::move(members);
    views_ = 0;
    cause_.clear();
  }
  ++views_;
  last_ = view.number;
  if (cause_.empty() || !is_consequence) cause_ = std::move(cause);
  told_ = false;
}

void Standstill::clear() {
  *this = {};
}

bool Standstill::takeVerdict() {
  return isHopeless() && !std::exchange(told_, true);
}

Duration Standstill::pause() const {
  Duration pause{0};
  for (int views = 2; views <= views_ && pause < kLongestPause; ++views) {
    pause = pause == Duration::zero() ? Duration(kFirstPause) : 2 * pause;
  }
  return std::min<Duration>(pause, kLongestPause);
}

std::string Standstill::describe() const {
  return "nothing succeeded in " + std::to_string(views_) + " views in a row of the same " +
         std::to_string(members_.size()) + " members, the last one view " + std::to_string(last_) +
         ": " + cause_;
}

}  // namespace torchft_ext
