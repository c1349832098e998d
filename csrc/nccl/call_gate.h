// Who may call NCCL on one communicator: one thread at a time, and after close() nobody but who
// closed it. In place of a lock, since no lock may be held over a call into NCCL: whoever waits
// here has a deadline, and an abort can tell a call that does not return from one that does.
//
// A call on a blocking communicator may sit inside until an abort's flags reach it: then the abort
// is called from outside the gate, which NCCL allows where it frees later (reap_batch.h).
//
// Owner: the device communicator. Threads: any. close() never blocks.
#pragma once

#include <atomic>

#include "base/mutex.h"

namespace torchft_ext {

class CallGate {
 public:
  // True: inside until leave(). False: closed, or not free by the deadline.
  bool enter(Deadline deadline);
  bool tryEnter() { return enter(Deadline::at(Clock::now())); }
  void leave();

  void close();  // nobody enters any more; one may still be inside
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  // Of a closed and empty one: inside until leave(), for whoever ends the communicator.
  void enterToEnd();
  bool occupied() const;
  // Waits until nobody is inside. False: not by the deadline.
  bool awaitEmpty(Deadline deadline);

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  bool inside_ GUARDED_BY(mutex_) = false;
  std::atomic<bool> closed_{false};  // written under mutex_
};

// Inside from construction to destruction, where entered() says so.
class GateEntry {
 public:
  GateEntry(CallGate& gate, Deadline deadline) : gate_(gate), entered_(gate.enter(deadline)) {}
  ~GateEntry() {
    if (entered_) gate_.leave();
  }
  GateEntry(const GateEntry&) = delete;
  GateEntry& operator=(const GateEntry&) = delete;
  bool entered() const { return entered_; }

 private:
  CallGate& gate_;
  const bool entered_;
};

}  // namespace torchft_ext
