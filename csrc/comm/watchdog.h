// The thread that enforces deadlines. It sees lifecycles and operation states through weak pointers
// only, never communicators: it can never become the last owner of one.
//
// Owner: the process (created at first use). Threads: watch() from any; it never blocks, and wakes
// the thread only when the new deadline is the earliest. At a deadline: the generation fails with
// kTimeout in the operation's name.
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
