// How long the thread that made it did not run, as its waits saw it: each looks here every 50 ms or
// so (runWaitHook()). So a process that was stopped, and left out meanwhile, can be told.
//
// Owner: the call that it is about, on its stack. Threads: that one's alone. One at a time for each
// thread; an inner one takes the outer one's place while it lives.
#pragma once

#include <algorithm>

#include "base/deadline.h"

namespace torchft_ext {

class Standstill {
 public:
  Standstill() : outer_(present()) { present() = this; }
  ~Standstill() {
    present() = outer_;
    goOn();
  }
  Standstill(const Standstill&) = delete;
  Standstill& operator=(const Standstill&) = delete;

  Duration longest() const { return std::max<Duration>(longest_, Clock::now() - last_); }

  // Behind what is not waiting: user code, an inner call of this kind.
  static void goOn() {
    if (present() != nullptr) present()->last_ = Clock::now();
  }
  static void look() {
    Standstill* const self = present();
    if (self == nullptr) return;
    const auto now = Clock::now();
    self->longest_ = std::max<Duration>(self->longest_, now - self->last_);
    self->last_ = now;
  }

 private:
  static Standstill*& present() {
    static thread_local Standstill* present = nullptr;
    return present;
  }

  Standstill* const outer_;
  Clock::time_point last_ = Clock::now();
  Duration longest_{0};
};

}  // namespace torchft_ext
