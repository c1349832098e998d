// Whose turn it is to issue: one thread at a time, and none waits without a limit.
//
// Owner: a generation. Threads: any. A signal's handler may run inside a wait of the thread whose
// turn it is: one that issues there would wait for itself, and is refused.
#pragma once

#include <functional>
#include <optional>
#include <stdexcept>
#include <thread>

#include "base/deadline.h"
#include "base/mutex.h"

namespace torchft_ext {

class IssueOrder {
 public:
  // Blocks until it is this thread's turn; calls the wait hook, which may throw. False: not by the
  // deadline, or given up (asked now and then; may be empty). Throws std::runtime_error where this
  // thread is at it already.
  bool enter(Deadline deadline, const std::function<bool()>& givenUp = nullptr);
  void leave();

 private:
  Mutex mutex_;
  CondVar changed_;
  std::optional<std::thread::id> owner_ GUARDED_BY(mutex_);
  int waiting_ GUARDED_BY(mutex_) = 0;
};

}  // namespace torchft_ext
