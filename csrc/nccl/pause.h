// The pauses between two looks at something that NCCL does in a thread of its own: a few yields
// first, since most calls are through in microseconds, then sleeps of 50 us to 1 ms.
//
// Owner: the stack of the thread that waits. next() calls the wait hook about every 50 ms, which
// may throw (a pending signal).
#pragma once

#include "base/deadline.h"

namespace torchft_ext {

class Pause {
 public:
  void next();

 private:
  int yields_ = 0;
  Duration sleep_ = std::chrono::microseconds(50);
  Clock::time_point hooked_ = Clock::now();
};

}  // namespace torchft_ext
