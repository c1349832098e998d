// Bytes that went over the connections of one generation, headers included.
// Threads: written by the loop, read by any. It outlives the connections.
#pragma once

#include <atomic>
#include <cstdint>

namespace torchft_ext {

struct Traffic {
  std::atomic<uint64_t> sent{0};
  std::atomic<uint64_t> received{0};
};

}  // namespace torchft_ext
