#include "base/main_thread_waits.h"

#include <unistd.h>

#include <atomic>

namespace torchft_ext {
namespace {

std::atomic<int> waits{0};  // one inside another; written by the main thread alone

bool isMainThread() {
  static thread_local const bool is = ::gettid() == ::getpid();
  return is;
}

void add(int count) {
  waits.store(waits.load(std::memory_order_relaxed) + count, std::memory_order_release);
}

}  // namespace

bool mainThreadWaits() {
  return waits.load(std::memory_order_acquire) > 0;
}

MainThreadWaits::MainThreadWaits() : counts_(isMainThread()) {
  if (counts_) add(1);
}

MainThreadWaits::~MainThreadWaits() {
  if (counts_) add(-1);
}

}  // namespace torchft_ext
