#include "comm/outstanding.h"

namespace torchft_ext {

uint64_t Outstanding::begin() {
  MutexLock lock(mutex_);
  const uint64_t number = next_++;
  numbers_.insert(number);
  return number;
}

void Outstanding::end(uint64_t number) {
  MutexLock lock(mutex_);
  if (numbers_.erase(number) > 0) changed_.notifyAll();
}

uint64_t Outstanding::mark() {
  MutexLock lock(mutex_);
  return next_;
}

bool Outstanding::awaitBelow(uint64_t mark, Deadline deadline) {
  MutexLock lock(mutex_);
  while (!numbers_.empty() && *numbers_.begin() < mark) {
    if (deadline.expired()) return false;
    changed_.waitUntil(mutex_, deadline);
  }
  return true;
}

}  // namespace torchft_ext
