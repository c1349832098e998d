// One absolute point in time after which a wait must have ended. Passed down by value through every
// layer, so that a caller's bound holds however many steps the call has.
#pragma once

#include <algorithm>
#include <chrono>

namespace torchft_ext {

using Clock = std::chrono::steady_clock;
using Duration = Clock::duration;
using std::chrono::milliseconds;

class Deadline {
 public:
  // A negative or overlong timeout (over a century) means "never".
  static Deadline after(Duration timeout) {
    constexpr auto kCentury = std::chrono::hours(24 * 365 * 100);
    if (timeout < Duration::zero() || timeout > kCentury) return never();
    return Deadline(Clock::now() + timeout);
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
