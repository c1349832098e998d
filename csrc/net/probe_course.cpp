#include "net/probe_course.h"

#include <algorithm>

namespace torchft_ext {

ProbeCourse::ProbeCourse(const ProbePatience& patience, Time now) : patience_(patience) {
  restartTime(now);
}

void ProbeCourse::restartTime(Time now) {
  const bool bounded = patience_.connect >= Duration::zero() && patience_.connect <= kCentury;
  give_up_ = bounded ? now + patience_.connect : Time::max();
}

ProbeCourse::Bounds ProbeCourse::nextBounds(Time now) const {
  const Duration left =
      give_up_ == Time::max() ? Duration(-1) : std::max<Duration>(give_up_ - now, kLeastTime);
  return {left, patience_.answer.value_or(left)};
}

ProbeCourse::Step ProbeCourse::onEnd(const Dial::Result& result, Time now) {
  if (const std::optional<Liveness> shown = livenessShownBy(result)) return {shown};
  if (result.end == Dial::End::kNoSocket && !patience_.awaits_a_socket) return {Liveness::kUnknown};
  if (result.end == Dial::End::kBroken) {
    ++breaks_;
    if (breaks_ == patience_.breaks_for_gone) return {Liveness::kGone};
    if (patience_.breaks_for_gone > 0) return tryAgain();
    if (breaks_ == 1) restartTime(now);
  }
  if (now < give_up_) return tryAgain();
  return {result.end == Dial::End::kNoSocket ? Liveness::kUnknown : Liveness::kUnreachable};
}

ProbeCourse::Step ProbeCourse::tryAgain() {
  pause_ = std::clamp(pause_ * 2, patience_.first_pause, patience_.longest_pause);
  return {std::nullopt, pause_};
}

}  // namespace torchft_ext
