// The tensors of an operation on device memory, kept for the device: until somebody has had a
// stream wait for the operation, behind which the allocator may use their memory again, or until it
// is through.
//
// Owner: the operation, and so whoever watches it; the Work sees it weakly. Threads: release() from
// any, again: nothing. What it kept is let go on the thread that releases it.
#pragma once

#include <memory>
#include <utility>

#include "base/mutex.h"

namespace torchft_ext {

class Stash {
 public:
  explicit Stash(std::shared_ptr<void> tensors) : tensors_(std::move(tensors)) {}

  void release() {
    std::shared_ptr<void> gone;  // without the lock: its end may be foreign code
    const MutexLock lock(mutex_);
    gone.swap(tensors_);
  }

 private:
  Mutex mutex_;
  std::shared_ptr<void> tensors_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
