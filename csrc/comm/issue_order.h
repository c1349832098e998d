// Whose turn it is to issue: one thread at a time, and none waits without a limit.
//
// IssueOrders has one for operations on host memory, and beside it one for those on devices, which
// may wait there for other ranks. A batch of both takes both, the host's first.
//
// Owner: a generation, so that an issue that hangs holds up no later one. Threads: any. A signal's
// handler may run inside a wait of the thread whose turn it is: one that issues there would wait
// for itself, and is refused.
#pragma once

#include <functional>
#include <memory>
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
  bool tryEnter();  // does not block, nor look at the clock
  void leave();

 private:
  bool tryEnterLocked() REQUIRES(mutex_);

  Mutex mutex_;
  CondVar changed_;
  std::optional<std::thread::id> owner_ GUARDED_BY(mutex_);
  int waiting_ GUARDED_BY(mutex_) = 0;
};

class IssueOrders {
 public:
  // Orders that were entered, and are left when it goes.
  class Turn {
    friend class IssueOrders;
    struct Leave {
      void operator()(IssueOrder* order) const { order->leave(); }
    };
    std::unique_ptr<IssueOrder, Leave> host_, device_;
  };

  // As those of IssueOrder. nullopt: where these are false.
  std::optional<Turn> tryEnter(bool host, bool device);
  std::optional<Turn> enter(bool host, bool device, Deadline deadline,
                            const std::function<bool()>& givenUp);

 private:
  IssueOrder host_;
  IssueOrder device_;
};

}  // namespace torchft_ext
