#include "comm/callback_pool.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <deque>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/threads.h"
#include "base/unique_fd.h"

namespace torchft_ext {
namespace {

// A thread that has used so much of the time that has passed computes.
constexpr int kComputesFrom = 20;  // a twentieth

Duration usedBy(clockid_t clock) {
  timespec used{};
  // Of a thread that has ended: none.
  if (::clock_gettime(clock, &used) != 0) return Duration::zero();
  return std::chrono::duration_cast<Duration>(std::chrono::seconds(used.tv_sec) +
                                              std::chrono::nanoseconds(used.tv_nsec));
}

// It has a processor or waits for one: on a busy machine a thread that computes may get none for
// long. False where the system does not say.
bool isRunnable(pid_t thread) {
  const std::string path = "/proc/self/task/" + std::to_string(thread) + "/stat";
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[128];  // number, (name), state, ...
  // The kernel answers from memory: it may be asked under a lock.
  // NOLINTNEXTLINE(clang-analyzer-unix.BlockInCriticalSection)
  const ssize_t length = file ? ::read(file.get(), text, sizeof text) : -1;
  if (length <= 0) return false;
  const std::string_view whole(text, static_cast<size_t>(length));
  const size_t name_end = whole.rfind(") ");
  return name_end != std::string_view::npos && whole.substr(name_end + 2).starts_with('R');
}

}  // namespace

void runGuarded(CallbackPool::Task task) noexcept {
  try {
    task();
    task = nullptr;
  } catch (const std::exception& error) {
    log(LogLevel::kError, std::string("a callback of a finished operation threw: ") + error.what());
  } catch (...) {
    log(LogLevel::kError, "a callback of a finished operation threw");
  }
}

struct CallbackPool::Shared : std::enable_shared_from_this<Shared> {
  explicit Shared(Bounds its_bounds) : bounds(its_bounds) {}

  struct Worker {
    OwnedThread thread;  // written before the thread's first look under the mutex
    pid_t id = 0;        // as the next
    clockid_t clock{};   // its own thread's, before it first has the turn
    int waits = 0;       // its own thread's: how many CallbackWaits it is in
  };
  struct Entry {
    Task task;
    Starved starved;
  };
  // Who runs a callback that others wait for, since when, and what was last seen of it.
  struct Turn {
    Worker* holder = nullptr;
    Clock::time_point since{};
    Clock::time_point looked{};
    Duration used{0};  // of its processor time, at that look
  };
  // Told without the mutex.
  struct Starving {
    std::vector<Starved> whom;
    std::string why;
    void tell() const {
      for (const Starved& starved : whom) starved(why);
    }
  };

  bool inherited() const { return fork_count != forkCount(); }  // its mutex may be held
  bool post(Entry entry) EXCLUDES(mutex);
  void runAll(Worker& self) EXCLUDES(mutex);
  bool next(Worker& self, Task* task) EXCLUDES(mutex);
  // What a thread that waits is to do: run a task, end, collect threads that have.
  enum class Next { kTask, kEnd, kJoin };
  Next await(Clock::time_point idle_since) REQUIRES(mutex);
  void hasReturned(Worker& self) EXCLUDES(mutex);
  void beginWait(Worker& self) EXCLUDES(mutex);
  void endWait(Worker& self) EXCLUDES(mutex);
  bool stop(Deadline deadline) EXCLUDES(mutex);

  bool turnIsFree() REQUIRES(mutex);
  bool isBlocked(Clock::time_point now) REQUIRES(mutex);
  void take(Worker& self) REQUIRES(mutex);
  void leaveTurn(const Worker& self) REQUIRES(mutex);
  Deadline untilNextLook(Clock::time_point idle_since) const REQUIRES(mutex);
  bool isSpare(Clock::time_point idle_since) const REQUIRES(mutex);
  // Where nobody waits for what is queued.
  Starving attend() REQUIRES(mutex);
  bool start(std::string* why) REQUIRES(mutex);
  void end(Worker& self) REQUIRES(mutex);

  // Of the calling thread; null: it is none of a pool's.
  static thread_local Shared* pool_here;
  static thread_local Worker* worker_here;

  // Its child, forked by a callback, has the thread but not the pool.
  static Shared* here() {
    return pool_here != nullptr && !pool_here->inherited() ? pool_here : nullptr;
  }

  // They have left the pool, and return now.
  static void join(const std::vector<std::unique_ptr<Worker>>& left) {
    for (const auto& worker : left) worker->thread.join(Deadline::after(std::chrono::seconds(1)));
  }

  const Bounds bounds;
  const uint64_t fork_count = forkCount();
  mutable Mutex mutex;
  CondVar changed;
  std::deque<Entry> queue GUARDED_BY(mutex);
  std::vector<std::unique_ptr<Worker>> workers GUARDED_BY(mutex);
  std::vector<std::unique_ptr<Worker>> ended GUARDED_BY(mutex);  // to be joined
  Turn turn GUARDED_BY(mutex);
  size_t waiting GUARDED_BY(mutex) = 0;    // threads, for a task
  size_t returning GUARDED_BY(mutex) = 0;  // threads, for the turn that they had given up
  size_t most_threads GUARDED_BY(mutex) = 0;
  bool stopping GUARDED_BY(mutex) = false;
};

thread_local CallbackPool::Shared* CallbackPool::Shared::pool_here = nullptr;
thread_local CallbackPool::Shared::Worker* CallbackPool::Shared::worker_here = nullptr;

// ---------------------------------------------------------------- the turn

bool CallbackPool::Shared::turnIsFree() {
  return turn.holder == nullptr || isBlocked(Clock::now());
}

// Its processor time tells a callback that waits from one that computes.
bool CallbackPool::Shared::isBlocked(Clock::time_point now) {
  if (now - turn.since >= bounds.runs_at_most) return true;
  const Duration passed = now - turn.looked;
  if (passed < bounds.blocked_after) return false;
  const Duration used = usedBy(turn.holder->clock);
  const bool computes = (used - turn.used) * kComputesFrom >= passed || isRunnable(turn.holder->id);
  turn.looked = now;
  turn.used = used;
  return !computes;
}

void CallbackPool::Shared::take(Worker& self) {
  const Clock::time_point now = Clock::now();
  turn = {&self, now, now, usedBy(self.clock)};
}

void CallbackPool::Shared::leaveTurn(const Worker& self) {
  if (turn.holder != &self) return;  // it was taken away
  turn.holder = nullptr;
  changed.notifyAll();
}

// ---------------------------------------------------------------- threads

bool CallbackPool::Shared::start(std::string* why) {
  auto worker = std::make_unique<Worker>();
  Worker* const raw = worker.get();
  try {
    // It looks at nothing before it has the mutex, which is held here.
    raw->thread =
        OwnedThread("ft-callback", [pool = shared_from_this(), raw] { pool->runAll(*raw); });
  } catch (const std::exception& error) {
    *why = std::string("no thread could be started for its callbacks: ") + error.what();
    return false;
  }
  workers.push_back(std::move(worker));
  most_threads = std::max(most_threads, workers.size());
  return true;
}

// Those that come back from their waits need no others to run first.
CallbackPool::Shared::Starving CallbackPool::Shared::attend() {
  Starving starving;
  if (queue.empty() || waiting > 0) return starving;
  const size_t held_up = workers.size() - returning;
  if (held_up >= bounds.threads)
    starving.why = "its callbacks found no thread: " + std::to_string(held_up) +
                   " callbacks of finished operations wait at the same time in this process";
  if (workers.size() < 2 * bounds.threads && start(&starving.why)) ++waiting;  // it will be
  if (starving.why.empty()) return starving;
  for (Entry& entry : queue) {
    if (entry.starved) starving.whom.push_back(std::exchange(entry.starved, nullptr));
  }
  return starving;
}

void CallbackPool::Shared::runAll(Worker& self) {
  self.id = ::gettid();
  ::pthread_getcpuclockid(::pthread_self(), &self.clock);
  pool_here = this;
  worker_here = &self;
  Task task;
  while (next(self, &task)) {
    runGuarded(std::exchange(task, nullptr));
    hasReturned(self);
  }
}

bool CallbackPool::Shared::isSpare(Clock::time_point idle_since) const {
  return queue.empty() && waiting > 1 && Clock::now() - idle_since >= bounds.spare_for;
}

Deadline CallbackPool::Shared::untilNextLook(Clock::time_point idle_since) const {
  if (!queue.empty()) return Deadline::after(bounds.blocked_after);
  return waiting > 1 ? Deadline::at(idle_since + bounds.spare_for) : Deadline::never();
}

CallbackPool::Shared::Next CallbackPool::Shared::await(Clock::time_point idle_since) {
  while (true) {
    if (!ended.empty()) return Next::kJoin;
    if (!queue.empty() && returning == 0 && turnIsFree()) return Next::kTask;
    if ((queue.empty() && stopping) || isSpare(idle_since)) return Next::kEnd;
    changed.waitUntil(mutex, untilNextLook(idle_since));
  }
}

// Whoever started this thread has counted it among those that wait.
bool CallbackPool::Shared::next(Worker& self, Task* task) {
  const Clock::time_point idle_since = Clock::now();
  while (true) {
    std::vector<std::unique_ptr<Worker>> left;
    Starving starving;
    Next found = Next::kJoin;
    {
      MutexLock lock(mutex);
      found = await(idle_since);
      if (found != Next::kJoin) --waiting;
      if (found == Next::kJoin) left.swap(ended);
      if (found == Next::kEnd) end(self);
      if (found == Next::kTask) {
        take(self);
        *task = std::move(queue.front().task);
        queue.pop_front();
        starving = attend();
      }
    }
    join(left);
    starving.tell();
    if (found != Next::kJoin) return found == Next::kTask;
  }
}

void CallbackPool::Shared::end(Worker& self) {
  const auto own = std::find_if(workers.begin(), workers.end(),
                                [&self](const auto& each) { return each.get() == &self; });
  ended.push_back(std::move(*own));
  workers.erase(own);
  changed.notifyAll();
}

void CallbackPool::Shared::hasReturned(Worker& self) {
  MutexLock lock(mutex);
  leaveTurn(self);
  ++waiting;
}

// ---------------------------------------------------------------- waits

void CallbackPool::Shared::beginWait(Worker& self) {
  if (self.waits++ > 0) return;
  Starving starving;
  {
    MutexLock lock(mutex);
    leaveTurn(self);
    starving = attend();
  }
  try {
    starving.tell();
  } catch (...) {  // the wait does not begin: its end is not called
    endWait(self);
    throw;
  }
}

void CallbackPool::Shared::endWait(Worker& self) {
  if (--self.waits > 0) return;
  MutexLock lock(mutex);
  ++returning;
  while (!turnIsFree()) changed.waitUntil(mutex, Deadline::after(bounds.blocked_after));
  --returning;
  take(self);
  if (returning == 0) changed.notifyAll();
}

CallbackWaits::CallbackWaits() {
  using Shared = CallbackPool::Shared;
  if (Shared* const pool = Shared::here()) pool->beginWait(*Shared::worker_here);
}

CallbackWaits::~CallbackWaits() {
  using Shared = CallbackPool::Shared;
  if (Shared* const pool = Shared::here()) pool->endWait(*Shared::worker_here);
}

// ---------------------------------------------------------------- the pool

bool CallbackPool::Shared::post(Entry entry) {
  Starving starving;
  {
    MutexLock lock(mutex);
    if (stopping) return false;
    queue.push_back(std::move(entry));
    starving = attend();
    changed.notifyAll();
  }
  starving.tell();
  return true;
}

bool CallbackPool::Shared::stop(Deadline deadline) {
  if (pool_here == this) return false;
  std::vector<std::unique_ptr<Worker>> left;
  bool all = false;
  {
    MutexLock lock(mutex);
    stopping = true;
    changed.notifyAll();
    while (!workers.empty() && !deadline.expired()) changed.waitUntil(mutex, deadline);
    left.swap(ended);
    all = workers.empty();
  }
  join(left);
  return all;
}

CallbackPool::CallbackPool(Bounds bounds) : shared_(std::make_shared<Shared>(bounds)) {}

CallbackPool::~CallbackPool() {
  stop(Deadline::after(std::chrono::seconds(1)));
}

bool CallbackPool::post(Task task, Starved starved) {
  return !shared_->inherited() && shared_->post({std::move(task), std::move(starved)});
}

Duration CallbackPool::presentRunsFor() const {
  MutexLock lock(shared_->mutex);
  if (shared_->turn.holder == nullptr) return Duration::zero();
  return Clock::now() - shared_->turn.since;
}

bool CallbackPool::stop(Deadline deadline) {
  return shared_->inherited() || shared_->stop(deadline);
}

CallbackPool::Counts CallbackPool::counts() const {
  MutexLock lock(shared_->mutex);
  return {shared_->workers.size(), shared_->most_threads, shared_->returning};
}

bool CallbackPool::onThread() {
  return Shared::here() != nullptr;
}

}  // namespace torchft_ext
