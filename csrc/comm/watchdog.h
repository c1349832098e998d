// The thread that enforces deadlines. It sees lifecycles and operation states through weak pointers
// only, never communicators: it can never become the last owner of one.
//
// Owner: the process (created at first use). Threads: watch() from any; it never blocks, and wakes
// the thread only when what is new is due first. At a deadline: the generation fails with kTimeout
// in the operation's name. Once a second while operations wait for longer than their generation
// asks after (Lifecycle::askAfter()): tells the generation which.
#pragma once

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/threads.h"
#include "comm/op_state.h"

namespace torchft_ext {

class Watchdog {
 public:
  Watchdog();
  ~Watchdog();
  void watch(const std::shared_ptr<OpState>& op);
  // The generations of operations that are watched and have not ended, each once. Never blocks.
  std::vector<std::shared_ptr<Lifecycle>> outstanding() const;
  bool stop(Deadline deadline);
  size_t watchedForTest();

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  OwnedThread thread_;
};

}  // namespace torchft_ext
