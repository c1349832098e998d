// The way out of a thread with a private descriptor table.
//
// Waking an EventLoop means writing to its eventfd, whose number says nothing, or something else,
// in another thread's private table. So the monitor's two threads never post to a loop, nor run
// foreign code that might (the log has a thread of its own): they hand tasks to the hand-off
// thread, which has the process's ordinary table and is woken without descriptors.
//
// Owner: PeerMonitor; shared with what lives on the loops. Threads: any; tasks run in the order
// they were handed over. After stop() tasks are dropped.
#pragma once

#include <memory>

#include "base/mutex.h"
#include "base/task_thread.h"
#include "net/event_loop.h"

namespace torchft_ext {

// Leads to a loop as long as that exists. Not to be used from a thread with a private table.
class LoopHandle {
 public:
  explicit LoopHandle(EventLoop& loop) : loop_(&loop) {}
  bool post(EventLoop::Task task);
  void close();

 private:
  Mutex mutex_;  // taken before the loop's own
  EventLoop* loop_ GUARDED_BY(mutex_);
};

class HandOffThread {
 public:
  explicit HandOffThread(bool realtime);  // on a thread with the ordinary table
  void run(EventLoop::Task task) { thread_.post(std::move(task)); }
  void post(const std::shared_ptr<LoopHandle>& handle, EventLoop::Task task);
  bool stop(Deadline deadline) { return thread_.stop(deadline); }

 private:
  TaskThread thread_;
};

}  // namespace torchft_ext
