#include "nccl/pause.h"

#include <algorithm>
#include <thread>

#include "comm/op_state.h"

namespace torchft_ext {
namespace {

constexpr int kYields = 50;
constexpr Duration kLongest = std::chrono::milliseconds(1);

}  // namespace

void Pause::next() {
  if (yields_ < kYields) {
    ++yields_;
    std::this_thread::yield();
    return;
  }
  std::this_thread::sleep_for(sleep_);
  sleep_ = std::min(2 * sleep_, kLongest);
  if (Clock::now() - hooked_ < kHookInterval) return;
  hooked_ = Clock::now();
  runWaitHook();
}

}  // namespace torchft_ext
