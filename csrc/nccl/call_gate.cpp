#include "nccl/call_gate.h"

namespace torchft_ext {

bool CallGate::enter(Deadline deadline) {
  MutexLock lock(mutex_);
  while (inside_ && !closed()) {
    if (deadline.expired()) return false;
    changed_.waitUntil(mutex_, deadline);
  }
  if (closed()) return false;
  inside_ = true;
  return true;
}

void CallGate::leave() {
  MutexLock lock(mutex_);
  inside_ = false;
  changed_.notifyAll();
}

void CallGate::close() {
  MutexLock lock(mutex_);
  closed_.store(true, std::memory_order_release);
  changed_.notifyAll();
}

void CallGate::enterToEnd() {
  MutexLock lock(mutex_);
  inside_ = true;
}

bool CallGate::occupied() const {
  MutexLock lock(mutex_);
  return inside_;
}

bool CallGate::awaitEmpty(Deadline deadline) {
  MutexLock lock(mutex_);
  while (inside_) {
    if (deadline.expired()) return false;
    changed_.waitUntil(mutex_, deadline);
  }
  return true;
}

}  // namespace torchft_ext
