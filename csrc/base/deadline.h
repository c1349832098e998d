// One absolute point in time after which a wait must have ended. Passed down by value through every
// layer, so that a caller's bound holds however many steps the call has.
#pragma once

#include <algorithm>
#include <chrono>

namespace torchft_ext {

using Clock = std::chrono::steady_clock;
using Duration = Clock::duration;
using std::chrono::milliseconds;

// A timeout over a century means "never". Nanoseconds hold less than three, so times in coarser
// units become a Duration through durationOf() alone, which keeps overlong ones overlong.
inline constexpr std::chrono::hours kCentury{24 * 365 * 100};

template <typename Rep, typename Period>
constexpr Duration durationOf(std::chrono::duration<Rep, Period> time) {
  if (time > kCentury) return Duration::max();
  if (time < -kCentury) return Duration::min();
  return std::chrono::duration_cast<Duration>(time);
}

class Deadline {
 public:
  // A negative or overlong timeout means "never".
  template <typename Rep, typename Period>
  static Deadline after(std::chrono::duration<Rep, Period> timeout) {
    const Duration wait = durationOf(timeout);
    if (wait < Duration::zero() || wait > kCentury) return never();
    return Deadline(Clock::now() + wait);
  }
  static Deadline at(Clock::time_point point) { return Deadline(point); }
  static Deadline never() { return Deadline(Clock::time_point::max()); }

  bool isNever() const { return at_ == Clock::time_point::max(); }
  bool expired() const { return !isNever() && Clock::now() >= at_; }
  Clock::time_point at() const { return at_; }
  // Zero when expired; Duration::max() for never().
  Duration remaining() const {
    return isNever() ? Duration::max() : std::max(Duration::zero(), at_ - Clock::now());
  }
  Deadline orEarlier(Deadline other) const { return Deadline(std::min(at_, other.at_)); }
  Deadline orEarlier(Duration timeout) const { return orEarlier(after(timeout)); }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

inline double toMilliseconds(Duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

}  // namespace torchft_ext
