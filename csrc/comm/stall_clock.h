// How long the thread that made it did not run, as its waits saw it: each looks here every 50 ms or
// so (runWaitHook()). So a process that was stopped, and left out meanwhile, can be told.
//
// Owner: the call that it is about, on its stack. Threads: that one's alone. One at a time for each
// thread; an inner one takes the outer one's place while it lives.
#pragma once

#include <algorithm>

#include "base/deadline.h"

namespace torchft_ext {

class StallClock {
 public:
  StallClock() : outer_(present()) { present() = this; }
  ~StallClock() {
    present() = outer_;
    goOn();
  }
  StallClock(const StallClock&) = delete;
  StallClock& operator=(const StallClock&) = delete;

  Duration longest() const { return std::max<Duration>(longest_, Clock::now() - last_); }

  // Behind what is not waiting: user code, an inner call of this kind.
  static void goOn() {
    if (present() != nullptr) present()->last_ = Clock::now();
  }
  static void look() {
    StallClock* const self = present();
    if (self == nullptr) return;
    const auto now = Clock::now();
    self->longest_ = std::max<Duration>(self->longest_, now - self->last_);
    self->last_ = now;
  }

 private:
  static StallClock*& present() {
    static thread_local StallClock* present = nullptr;
    return present;
  }

  StallClock* const outer_;
  Clock::time_point last_ = Clock::now();
  Duration longest_{0};
};

}  // namespace torchft_ext
