#include "base/fork.h"

#include <pthread.h>

namespace torchft_ext {
namespace {

std::atomic<uint64_t> generation{0};

void countFork() {
  generation.fetch_add(1, std::memory_order_relaxed);
}

const int kRegistered = pthread_atfork(nullptr, nullptr, countFork);

}  // namespace

uint64_t forkGeneration() noexcept {
  static_cast<void>(kRegistered);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace torchft_ext
