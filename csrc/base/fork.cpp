#include "base/fork.h"

#include <pthread.h>

namespace torchft_ext {
namespace {

std::atomic<uint64_t> fork_count{0};

void countFork() {
  fork_count.fetch_add(1, std::memory_order_relaxed);
}

const int kRegistered = pthread_atfork(nullptr, nullptr, countFork);

}  // namespace

uint64_t forkCount() noexcept {
  static_cast<void>(kRegistered);
  return fork_count.load(std::memory_order_relaxed);
}

}  // namespace torchft_ext
