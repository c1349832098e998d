// Words that the peer monitor's parts share. Values only.
#pragma once

#include <cstdint>

#include "base/deadline.h"
#include "base/identity.h"

namespace torchft_ext {

// Which of the monitor's two threads a connection belongs to; also its channel in the handshake.
enum class LivenessKind : uint8_t { kMain = 2, kBackup = 3 };

// How a connection that stood came to its end.
enum class LivenessEnd {
  kIdle,     // the peer closed it, since no watch of its needs it
  kLeft,     // the peer's process leaves
  kAccused,  // the peer had declared this process dead
  kBroken,   // without a word
};

struct ProbeOrder {
  uint64_t number = 0;  // its answer carries it; 0 stands for what nobody asked
  Duration connect{};   // how long to try
  Duration answer{};    // from the start; negative: for as long as it takes
};

}  // namespace torchft_ext
