// One thread that waits for many descriptors (epoll), timers and posted tasks.
//
// Owner: whoever constructs it; the destructor stops and joins (a second at most, then the thread is
// abandoned and logged). Threads: post(), runOnLoop(), inLoop(), wake-ups from any thread; everything marked
// "loop" only on the loop's own thread (asserted). Handlers must not block and must not throw; an exception
// from one is logged as an error. After stop(): post() returns false, runOnLoop() returns false.
// Order in one turn: descriptors, then timers, then tasks posted before the turn began. So what a
// peer sent before a deadline passed is read before the deadline is judged.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "base/mutex.h"
#include "base/threads.h"
#include "base/unique_fd.h"

namespace torchft_ext {

struct LoopTraits {
  // The thread has a descriptor table of its own (Linux 5.9 close_range, else unshare(CLONE_FILES)), which the
  // kernel closes as soon as the thread ends, before it frees the process's memory. Every descriptor that
  // is made on the loop is then known to the loop's thread alone, and must be closed there.
  bool private_table = false;
  // SCHED_FIFO at the lowest priority where allowed; goes on without where not.
  bool realtime = false;
};

class EventLoop {
 public:
  using Task = std::function<void()>;
  using IoHandler = std::function<void(uint32_t epoll_events)>;
  using TimerId = uint64_t;  // 0 is never a valid id

  explicit EventLoop(std::string name, LoopTraits traits = {});
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Any thread. Tasks of one thread run in the order posted. False once stopped: the task is
  // destroyed unrun, on the calling thread.
  bool post(Task task);
  bool inLoop() const;
  bool hasPrivateTable() const;  // asked for, and got
  bool isRealtime() const;
  // Runs the task on the loop and waits for it; runs it at once when called on the loop. False: not
  // run or not finished by the deadline (it may still run later: capture by shared_ptr).
  bool runOnLoop(Task task, Deadline deadline);
  bool stop(Deadline deadline);

  // Loop. A descriptor is watched by one handler; the caller keeps it open until unwatch(). After
  // unwatch() returns the handler is not called again, even if an event was already fetched.
  void watch(int fd, uint32_t epoll_events, IoHandler handler);
  void modify(int fd, uint32_t epoll_events);
  void unwatch(int fd);

  // Loop. The task runs once, not before the given time. cancel() of a spent id does nothing.
  TimerId runAt(Clock::time_point when, Task task);
  void cancel(TimerId id);

 private:
  struct Watch {
    uint64_t generation = 0;
    std::shared_ptr<IoHandler> handler;
  };

  void prepareThread();
  void run();
  void handleEvents(int timeout_ms);
  void runDueTimers();
  void runPostedTasks();
  int nextTimeoutMs();

  const LoopTraits traits_;
  UniqueFd wake_;  // eventfd; made in the shared table, kept open in the private one
  std::atomic<bool> has_private_table_{false};  // written once by the loop's thread
  std::atomic<bool> is_realtime_{false};

  Mutex mutex_;
  std::deque<Task> tasks_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;

  // Loop thread only.
  int epoll_ = -1;  // made and closed by the loop's thread
  std::unordered_map<int, Watch> watches_;
  uint64_t next_generation_ = 1;
  std::multimap<Clock::time_point, std::pair<TimerId, Task>> timers_;
  std::unordered_map<TimerId, std::multimap<Clock::time_point, std::pair<TimerId, Task>>::iterator> timer_index_;
  TimerId next_timer_ = 1;

  OwnedThread thread_;  // last: started when all of the above exists
};

}  // namespace torchft_ext
