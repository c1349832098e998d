// What this process's main thread does, for members that wait for this one. Any thread.
#pragma once

#include <cstdint>

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

// "its main thread sleeps"; empty for kUnknown.
const char* describe(MainThread state);

// Reads a small file of /proc unless it waits here.
MainThread mainThreadNow();

}  // namespace torchft_ext
