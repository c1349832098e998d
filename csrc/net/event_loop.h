// One thread that waits for many descriptors (epoll), timers and posted tasks.
//
// Owner: whoever constructs it; the destructor stops and joins (a second at most, then the thread
// is abandoned and logged). Threads: post(), runOnLoop(), inLoop(), wake-ups from any thread;
// everything marked "loop" only on the loop's own thread (asserted). Handlers must not block and
// must not throw; an exception from one is logged as an error. After stop(): post() returns false,
// runOnLoop() returns false; tasks whose post() returned true still run, then handlers and timers
// are destroyed, all on the loop's thread. In a forked child the loop counts as stopped. Order in
// one turn: descriptors, then timers that were due when the turn began, then the tasks posted so
// far. So what a peer sent before a deadline passed is read before the deadline is judged.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "base/threads.h"
#include "base/unique_fd.h"

namespace torchft_ext {

struct LoopTraits {
  // The thread has a descriptor table of its own (Linux 5.9 close_range, else
  // unshare(CLONE_FILES)), which the kernel closes as soon as the thread ends, before it frees the
  // process's memory. Every descriptor that is made on the loop is then known to the loop's thread
  // alone, and must be closed there. Never granted in builds for ThreadSanitizer, which knows a
  // descriptor by its number alone and would see races between two tables.
  bool private_table = false;
  // SCHED_FIFO at the lowest priority where allowed; goes on without where not.
  bool realtime = false;
};

class EventLoop {
 public:
  using Task = std::function<void()>;
  using IoHandler = std::function<void(uint32_t epoll_events)>;
  using TimerId = uint64_t;  // 0 is never a valid id

  // Returns when the thread is ready. Throws std::system_error if the kernel has no thread or
  // descriptor left.
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
  // False: a handler had not returned by the deadline (or this is the loop's own thread); the loop
  // ends when it has.
  bool stop(Deadline deadline);

  // Loop. A descriptor is watched by one handler; the caller keeps it open until unwatch(). After
  // unwatch() returns the handler is not called again, even if an event was already fetched.
  // watch() throws std::system_error if the kernel refuses; watching a watched number again
  // replaces the handler.
  void watch(int fd, uint32_t epoll_events, IoHandler handler);
  void modify(int fd, uint32_t epoll_events);
  void unwatch(int fd);

  // Loop. The task runs once, not before the given time. cancel() of a spent id does nothing.
  TimerId runAt(Clock::time_point when, Task task);
  void cancel(TimerId id);

 private:
  struct Core;
  bool onOwnLoop() const;

  UniqueFd wake_;  // eventfd in the owner's table; a private table has its own copy under the same
                   // number
  std::shared_ptr<Core>
      core_;  // shared with the thread, which outlives this object if it is abandoned
  OwnedThread thread_;
};

}  // namespace torchft_ext
