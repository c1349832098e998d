// Threads that run callbacks of finished operations, one callback at a time unless one waits.
//
// Callbacks share state that nothing guards (a hook's, an optimizer's), so they take turns: a
// thread runs a callback while it has the turn. A callback that waits (CallbackWaits) gives the
// turn up meanwhile and takes it back, before any callback that has not begun. One that neither
// returns nor computes for Bounds::blocked_after waits for something that nobody told the pool of;
// it loses the turn, as does one that runs for longer than Bounds::runs_at_most. To wait for the
// GIL is to wait: a callback that another thread keeps from it for so long loses the turn too, and
// the next one runs beside it. So what callbacks share is safe from that only as far as the GIL, or
// a lock of theirs, makes it so.
//
// The end of a wait has no deadline: a callback that comes back lasts until those who have the turn
// before it are through, for Bounds::runs_at_most each at the most.
//
// A post, a wait, or a thread that takes a task, that finds no thread waiting for the rest of the
// queue starts another. At Bounds::threads, without those that come back from a wait, that is a
// fault of the program: what is queued is told (`starved`, once each), and as many threads again
// may start, so that the waits of the failed generations, which end now, find somebody to run what
// ends them.
//
// States of a thread: waiting (for a task and the turn) -> running, with the turn or without ->
// waiting; it ends when the pool stops, and a spare one after Bounds::spare_for without a task.
// Threads: post(), counts(), presentRunsFor() from any, and they never block on a callback;
// stop() from any but the pool's own. Owner: the process (callbacks.cpp) or a test, which stops it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/deadline.h"

namespace torchft_ext {

class CallbackPool {
 public:
  struct Bounds {
    size_t threads = 64;
    Duration blocked_after = std::chrono::milliseconds(100);
    Duration runs_at_most = std::chrono::seconds(10);
    Duration spare_for = std::chrono::seconds(1);
  };
  using Task = std::function<void()>;
  // Told why no thread is left to run the task; it stays queued. On the thread that finds out, a
  // callback's that begins to wait among them, without a lock. May be empty.
  using Starved = std::function<void(const std::string& why)>;

  CallbackPool() : CallbackPool(Bounds{}) {}
  explicit CallbackPool(Bounds bounds);
  ~CallbackPool();  // stop() with a second

  // False: stopped, the task was destroyed unrun.
  bool post(Task task, Starved starved = nullptr);
  // For how long the callback that has the turn has run; zero: nobody has it.
  Duration presentRunsFor() const;
  // Runs what is queued, then ends. False if a callback still runs at the deadline, or if the
  // caller is one.
  bool stop(Deadline deadline);

  struct Counts {
    size_t threads = 0;
    size_t most_threads = 0;
    size_t coming_back = 0;  // now, from their waits
  };
  Counts counts() const;

  static bool onThread();  // the calling thread is one of a pool's

 private:
  friend class CallbackWaits;
  struct Shared;
  const std::shared_ptr<Shared> shared_;  // also held by the threads
};

// Around a wait of the calling thread, whichever that is. Its end may block until it is this
// callback's turn: not under a lock, nor the GIL.
class CallbackWaits {
 public:
  CallbackWaits();
  ~CallbackWaits();
  CallbackWaits(const CallbackWaits&) = delete;
  CallbackWaits& operator=(const CallbackWaits&) = delete;
};

// What a callback throws is logged; what it captured ends here too.
void runGuarded(CallbackPool::Task task) noexcept;

}  // namespace torchft_ext
