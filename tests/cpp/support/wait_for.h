// Waits in tests: for a condition, with a bound that only a broken build reaches.
#pragma once

#include <functional>
#include <thread>

#include "base/deadline.h"

namespace torchft_ext {

inline constexpr std::chrono::seconds kTestPatience{60};

inline Deadline testDeadline() {
  return Deadline::after(kTestPatience);
}

// True once the condition holds. False: it did not within the test's patience.
inline bool waitFor(const std::function<bool()>& condition) {
  const Deadline deadline = testDeadline();
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

}  // namespace torchft_ext
