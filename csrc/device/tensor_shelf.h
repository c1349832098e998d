// The tensors of an operation on device memory, kept for the device: until somebody has had a
// stream wait for the operation, behind which the allocator may use their memory again, or until it
// is through.
//
// Owner: the operation, and so whoever watches it; the Work sees it weakly. Threads: release() from
// any, again: nothing. What it kept is let go on the thread that releases it, a caller's, at once;
// else with the shelf, by `elsewhere` where that is given.
#pragma once

#include <memory>
#include <utility>

#include "base/mutex.h"

namespace torchft_ext {

class TensorShelf {
 public:
  using Release = void (*)(std::shared_ptr<void> tensors);
  explicit TensorShelf(std::shared_ptr<void> tensors, Release elsewhere = nullptr)
      : tensors_(std::move(tensors)), elsewhere_(elsewhere) {}
  ~TensorShelf() {
    if (tensors_ && elsewhere_ != nullptr) elsewhere_(std::move(tensors_));
  }
  TensorShelf(const TensorShelf&) = delete;
  TensorShelf& operator=(const TensorShelf&) = delete;

  void release() {
    std::shared_ptr<void> gone;  // without the lock: its end may be foreign code
    const MutexLock lock(mutex_);
    gone.swap(tensors_);
  }

 private:
  Mutex mutex_;
  std::shared_ptr<void> tensors_ GUARDED_BY(mutex_);
  const Release elsewhere_;
};

}  // namespace torchft_ext
