#include "net/event_loop.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <exception>
#include <map>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/shortage.h"
#include "net/private_table.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kReadyWithin{30};
constexpr std::chrono::seconds kStopWithin{1};
constexpr int kEventsPerTurn = 64;
constexpr uint64_t kWakeTag = 0;  // tokens start at 1, so that no descriptor has this tag

uint64_t tagOf(int fd, uint32_t token) {
  return (static_cast<uint64_t>(token) << 32U) | static_cast<uint32_t>(fd);
}

std::system_error lacking(int error, const std::string& what) {
  return {error, std::generic_category(), what + shortageNumbers(error)};
}

bool becomeRealtime() {
  sched_param parameters{};
  parameters.sched_priority = ::sched_get_priority_min(SCHED_FIFO);
  // 0 names the calling thread; the flag keeps processes that are forked from it ordinary.
  return ::sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &parameters) == 0;
}

int millisecondsUntil(Clock::time_point when) {
  constexpr int64_t kLongest = 3'600'000;
  const auto now = Clock::now();
  if (when <= now) return 0;
  return static_cast<int>(
      std::min<int64_t>(std::chrono::ceil<milliseconds>(when - now).count(), kLongest));
}

}  // namespace

struct EventLoop::Core {
  struct Registration {
    uint32_t token = 0;
    std::shared_ptr<IoHandler> handler;
  };
  struct Timer {
    TimerId id = 0;
    Task task;
  };
  using Timers = std::multimap<Clock::time_point, Timer>;

  Core(std::string loop_name, LoopTraits loop_traits, int wake_fd)
      : name(std::move(loop_name)), traits(loop_traits), wake(wake_fd) {}

  void run() noexcept;
  void prepare();
  void turn(int timeout_ms);
  int handleEvents(int timeout_ms);
  void runDueTimers(Clock::time_point now);
  void runPostedTasks();
  bool beginTurn(int* timeout_ms) EXCLUDES(mutex);
  void giveUp(int why) EXCLUDES(mutex);
  void end();
  template <typename Call>
  void guarded(const char* what, Call&& call) noexcept;

  // Constant after construction.
  const std::string name;
  const LoopTraits traits;
  const int wake;
  const uint64_t fork_count = forkCount();

  // Written by the loop's thread before ready; read by any.
  std::atomic<bool> has_private_table{false};
  std::atomic<bool> is_realtime{false};

  Mutex mutex;
  CondVar changed;
  std::vector<Task> tasks GUARDED_BY(mutex);
  bool stopping GUARDED_BY(mutex) = false;
  bool ready GUARDED_BY(mutex) = false;
  int error GUARDED_BY(mutex) = 0;  // why the thread could not be prepared

  // Loop thread only.
  int epoll = -1;  // made and closed by the loop's thread: in a private table nobody else knows it
  std::vector<Task> running;  // swapped with tasks, so that neither allocates in the long run
  std::unordered_map<int, Registration> registrations;
  uint32_t last_token = 0;
  Timers timers;
  std::unordered_map<TimerId, Timers::iterator> timer_index;
  TimerId last_timer = 0;
};

template <typename Call>
void EventLoop::Core::guarded(const char* what, Call&& call) noexcept {
  try {
    call();
  } catch (const std::exception& thrown) {
    log(LogLevel::kError, std::string(what) + " on loop " + name + " threw: " + thrown.what());
  } catch (...) {
    log(LogLevel::kError, std::string(what) + " on loop " + name + " threw an unknown exception");
  }
}

void EventLoop::Core::prepare() {
  if (traits.private_table) has_private_table = takePrivateTable(wake);
  if (traits.realtime) is_realtime = becomeRealtime();
  epoll = ::epoll_create1(EPOLL_CLOEXEC);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;  // edges: the counter need never be read
  event.data.u64 = kWakeTag;
  const bool made = epoll >= 0 && ::epoll_ctl(epoll, EPOLL_CTL_ADD, wake, &event) == 0;
  const int why = made ? 0 : errno;
  MutexLock lock(mutex);
  error = why;
  ready = true;
  if (!made) stopping = true;
  changed.notifyAll();
}

void EventLoop::Core::run() noexcept {
  prepare();
  int timeout_ms = 0;
  while (beginTurn(&timeout_ms)) turn(timeout_ms);
  end();
}

bool EventLoop::Core::beginTurn(int* timeout_ms) {
  *timeout_ms = -1;
  if (!timers.empty()) *timeout_ms = millisecondsUntil(timers.begin()->first);
  MutexLock lock(mutex);
  if (!tasks.empty()) *timeout_ms = 0;
  return !stopping;
}

void EventLoop::Core::turn(int timeout_ms) {
  // Timers are judged by the time before the descriptors were polled, and not while some were left
  // unpolled.
  const auto began = Clock::now();
  int rounds = 0;
  while (handleEvents(timeout_ms) == kEventsPerTurn && ++rounds < 16) timeout_ms = 0;
  runDueTimers(began);
  runPostedTasks();
}

int EventLoop::Core::handleEvents(int timeout_ms) {
  std::array<epoll_event, kEventsPerTurn> events;
  const int count = ::epoll_wait(epoll, events.data(), kEventsPerTurn, timeout_ms);
  if (count < 0 && errno != EINTR) giveUp(errno);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.u64 == kWakeTag) continue;
    const auto found = registrations.find(static_cast<int>(event.data.u64 & 0xffffffffU));
    // An earlier handler of this turn may have ended this registration, or begun another one under
    // its number.
    if (found == registrations.end() || found->second.token != event.data.u64 >> 32U) continue;
    const std::shared_ptr<IoHandler> handler = found->second.handler;  // it may unwatch itself
    guarded("a descriptor's handler", [&] { (*handler)(event.events); });
  }
  return count;
}

// Somebody closed a descriptor that is not theirs: going on would spin for ever.
void EventLoop::Core::giveUp(int why) {
  log(LogLevel::kError, "loop " + name + " ends: epoll_wait: " +
                            std::error_code(why, std::generic_category()).message());
  MutexLock lock(mutex);
  stopping = true;
}

void EventLoop::Core::runDueTimers(Clock::time_point now) {
  const TimerId newest = last_timer;  // those made meanwhile wait for the next turn
  auto next = timers.begin();
  while (next != timers.end() && next->first <= now) {
    if (next->second.id > newest) {
      ++next;
      continue;
    }
    Task task = std::move(next->second.task);
    timer_index.erase(next->second.id);
    timers.erase(next);
    guarded("a timer", [&] {
      task();
      task = nullptr;
    });
    next = timers.begin();  // the task may have cancelled any other
  }
}

void EventLoop::Core::runPostedTasks() {
  {
    MutexLock lock(mutex);
    running.swap(tasks);
  }
  for (Task& posted : running) {
    guarded("a task", [&] {
      const Task task = std::move(posted);
      task();
    });
  }
  running.clear();
}

// Handlers and timers own what they captured, descriptors of this thread's table among it: they end
// here.
void EventLoop::Core::end() {
  runPostedTasks();
  for (int round = 0; round < 8 && !(registrations.empty() && timers.empty()); ++round) {
    timer_index.clear();
    guarded("the end of a handler", [&] { const auto ended = std::exchange(registrations, {}); });
    guarded("the end of a timer", [&] { const auto ended = std::exchange(timers, {}); });
  }
  if (epoll >= 0) ::close(std::exchange(epoll, -1));
}

EventLoop::EventLoop(std::string name, LoopTraits traits)
    : wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) throw lacking(errno, "eventfd for loop " + name);
  core_ = std::make_shared<Core>(name, traits, wake_.get());
  thread_ = OwnedThread(std::move(name), [core = core_] { core->run(); });
  int error = 0;
  {
    const Deadline deadline = Deadline::after(kReadyWithin);
    MutexLock lock(core_->mutex);
    while (!core_->ready && !deadline.expired()) core_->changed.waitUntil(core_->mutex, deadline);
    error = core_->ready ? core_->error : ETIMEDOUT;
  }
  if (error == 0) return;
  stop(Deadline::after(kStopWithin));
  throw lacking(error, "epoll for loop " + core_->name);
}

EventLoop::~EventLoop() {
  if (stop(Deadline::after(kStopWithin))) return;
  thread_.abandon(inLoop() ? "it destroyed its own loop"
                           : "a handler had not returned 1 s after its loop was stopped");
}

bool EventLoop::post(Task task) {
  if (core_->fork_count != forkCount()) return false;
  bool was_empty = false;
  {
    MutexLock lock(core_->mutex);
    if (core_->stopping) return false;
    was_empty = core_->tasks.empty();
    core_->tasks.push_back(std::move(task));
  }
  // The loop looks for tasks before it waits: those of its own thread need no wake-up, nor does a
  // second one.
  if (was_empty && !inLoop()) ::eventfd_write(wake_.get(), 1);
  return true;
}

bool EventLoop::inLoop() const {
  return thread_.isSelf();
}
bool EventLoop::hasPrivateTable() const {
  return core_->has_private_table;
}
bool EventLoop::isRealtime() const {
  return core_->is_realtime;
}

bool EventLoop::runOnLoop(Task task, Deadline deadline) {
  struct Call {
    Mutex mutex;
    CondVar changed;
    bool done GUARDED_BY(mutex) = false;
  };
  if (inLoop()) {
    core_->guarded("a task", task);
    return true;
  }
  auto call = std::make_shared<Call>();
  const bool posted = post([core = core_.get(), call, task = std::move(task)]() mutable {
    core->guarded("a task", task);
    task = nullptr;  // what it captured is gone when the caller goes on
    MutexLock lock(call->mutex);
    call->done = true;
    call->changed.notifyAll();
  });
  if (!posted) return false;
  MutexLock lock(call->mutex);
  while (!call->done && !deadline.expired()) call->changed.waitUntil(call->mutex, deadline);
  return call->done;
}

bool EventLoop::stop(Deadline deadline) {
  if (core_->fork_count != forkCount()) return true;
  {
    MutexLock lock(core_->mutex);
    core_->stopping = true;
  }
  ::eventfd_write(wake_.get(), 1);
  return thread_.join(deadline);
}

bool EventLoop::onOwnLoop() const {
  assert(inLoop());
  return core_->epoll >= 0;
}

void EventLoop::watch(int fd, uint32_t epoll_events, IoHandler handler) {
  unwatch(fd);
  if (!onOwnLoop()) return;
  if (++core_->last_token == 0) ++core_->last_token;
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = tagOf(fd, core_->last_token);
  if (::epoll_ctl(core_->epoll, EPOLL_CTL_ADD, fd, &event) != 0) {
    throw lacking(errno, "epoll on loop " + core_->name);
  }
  core_->registrations[fd] = {core_->last_token, std::make_shared<IoHandler>(std::move(handler))};
}

void EventLoop::modify(int fd, uint32_t epoll_events) {
  if (!onOwnLoop()) return;
  const auto found = core_->registrations.find(fd);
  assert(found != core_->registrations.end());
  if (found == core_->registrations.end()) return;
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = tagOf(fd, found->second.token);
  ::epoll_ctl(core_->epoll, EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::unwatch(int fd) {
  if (!onOwnLoop()) return;
  const auto found = core_->registrations.find(fd);
  if (found == core_->registrations.end()) return;
  // its end may call unwatch() for another
  const Core::Registration ended = std::move(found->second);
  core_->registrations.erase(found);
  ::epoll_ctl(core_->epoll, EPOLL_CTL_DEL, fd, nullptr);
}

EventLoop::TimerId EventLoop::runAt(Clock::time_point when, Task task) {
  if (!onOwnLoop()) return ++core_->last_timer;
  const TimerId id = ++core_->last_timer;
  const auto at = core_->timers.emplace(when, Core::Timer{id, std::move(task)});
  core_->timer_index.emplace(id, at);
  return id;
}

void EventLoop::cancel(TimerId id) {
  if (!onOwnLoop()) return;
  const auto found = core_->timer_index.find(id);
  if (found == core_->timer_index.end()) return;
  const Task ended = std::move(found->second->second.task);
  core_->timers.erase(found->second);
  core_->timer_index.erase(found);
}

}  // namespace torchft_ext
