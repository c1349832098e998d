// What this process's main thread does, for members that wait for this one. Any thread.
#pragma once

#include <cstdint>
#include <string>

#include "base/deadline.h"

namespace torchft_ext {

// The numbers travel on the wire: append only.
enum class MainThread : uint8_t {
  kUnknown = 0,
  kWaits = 1,    // in this library
  kRuns = 2,     // the rest as the kernel has it
  kSleeps = 3,   // in a system call, or for a lock
  kBlocked = 4,  // uninterruptibly
  kStopped = 5,
  kEnded = 6,
};
inline constexpr auto kLastMainThread = MainThread::kEnded;

struct MainThreadNow {
  MainThread state = MainThread::kUnknown;
  // While it sleeps: it has not run since it was first looked at this long ago.
  Duration for_at_least{0};
  friend bool operator==(const MainThreadNow&, const MainThreadNow&) = default;
};

// "its main thread sleeps, for at least 3 s"; empty for kUnknown.
std::string describe(const MainThreadNow& now);

// Reads two small files of /proc unless it waits here.
MainThreadNow mainThreadNow();

}  // namespace torchft_ext
