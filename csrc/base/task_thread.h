// A thread that runs posted tasks in order. Owned by whoever constructs it.
// Threads: post() from any; run() bodies only on its own. After stop(): post() returns false.
#pragma once

#include <deque>
#include <functional>
#include <string>

#include "base/mutex.h"
#include "base/threads.h"

namespace torchft_ext {

class TaskThread {
 public:
  explicit TaskThread(std::string name);
  ~TaskThread();  // stop() with a second; abandons the thread if a task does not return

  bool post(std::function<void()> task);  // false: stopped, the task was destroyed unrun
  bool isSelf() const { return thread_.isSelf(); }
  // Runs what is queued, then ends. False if a task still runs at the deadline.
  bool stop(Deadline deadline);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;  // also held by the thread, which may outlive this object
  OwnedThread thread_;
};

}  // namespace torchft_ext
