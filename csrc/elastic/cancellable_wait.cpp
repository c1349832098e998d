#include "elastic/cancellable_wait.h"

#include "base/main_thread_waits.h"

namespace torchft_ext {

constexpr milliseconds kBetweenLooks{10};

void waitUntilDone(Mutex& mutex, CondVar& changed, const std::function<bool()>& done,
                   Deadline deadline, const Cancelled& cancelled) {
  const MainThreadWaits main_thread_waits;
  while (!done() && !deadline.expired()) {
    if (!cancelled) {
      changed.waitUntil(mutex, deadline);
      continue;
    }
    changed.waitUntil(mutex, deadline.orEarlier(kBetweenLooks));
    mutex.unlock();
    bool give_up = false;
    try {
      give_up = cancelled();
    } catch (...) {
      mutex.lock();
      throw;
    }
    mutex.lock();
    if (give_up) return;
  }
}

}  // namespace torchft_ext
