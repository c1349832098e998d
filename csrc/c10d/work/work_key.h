// By what completion hooks know a Work (success_hooks.h): a number that no other Work of the
// process has, after it has gone either.
#pragma once

#include <torch/headeronly/version.h>

#include <atomic>
#include <cstdint>

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
#define TORCHFT_EXT_WORK_HAS_KEY  // Work::getCompletionKey(), and hooks that take the key
#endif

namespace torchft_ext {

// Any thread.
inline uint64_t nextWorkKey() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace torchft_ext
