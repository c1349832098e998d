#include "nccl/event_poller.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/log.h"
#include "device/event_pool.h"

namespace torchft_ext {
namespace {

constexpr Duration kShortest = std::chrono::microseconds(100);
constexpr Duration kLongest = std::chrono::milliseconds(2);
constexpr Duration kErrorInterval = std::chrono::milliseconds(50);
constexpr int kLastLooks = 50;  // at what has fired when the thread is to end

FailurePtr failureOf(const Lifecycle& lifecycle) {
  if (FailurePtr failure = lifecycle.failure()) return failure;
  auto ended = std::make_shared<Failure>();
  ended->kind = FailureKind::kAborted;
  ended->cause.how = "the generation has ended";
  return ended;
}

void finish(const WatchedOp& op, FailurePtr failure) {
  op.state->complete(std::move(failure));
  op.outstanding->end(op.number);
}

void judge(const WatchedOp& op, Lifecycle& lifecycle) {
  std::string objection = op.result_check ? op.result_check() : "";
  if (objection.empty()) return;
  Failure failure = lifecycle.ownFailure(FailureKind::kAborted, std::move(objection));
  failure.op = toString(op.state->kind());
  failure.seq = op.state->seq();
  lifecycle.fail(std::move(failure));
}

enum class Fired { kNo, kYes, kUnknown };

// Unknown: the device is in error, and will not tell better later; the generation has failed.
Fired fired(const c10::Event& event, Lifecycle& lifecycle) {
  try {
    return event.query() ? Fired::kYes : Fired::kNo;
  } catch (const std::exception& error) {
    Failure failure;
    failure.kind = FailureKind::kInternal;
    failure.cause.how = std::string("the device reported an error: ") + error.what();
    lifecycle.fail(std::move(failure));
    return Fired::kUnknown;
  }
}

// Of one whose state is complete: whether the device is through with its buffers.
Fired drained(WatchedOp& op, Lifecycle& lifecycle) {
  if (!op.interrupted) return fired(*op.end, lifecycle);
  if (!op.comm->atRest()) return Fired::kNo;
  if (!op.behind_all) {
    if (op.comm->setup().platform->cuda->capturing(op.stream)) return Fired::kNo;
    try {
      auto event = EventPool::fresh(op.stream.device(), false);
      event->record(op.stream);
      op.behind_all = std::move(event);
    } catch (const std::exception& error) {
      log(LogLevel::kError, std::string("no event can be recorded behind an aborted operation: its "
                                        "buffers are kept: ") +
                                error.what());
      return Fired::kUnknown;
    }
  }
  return fired(*op.behind_all, lifecycle);
}

// A thread that has named no device speaks to the first one, and makes a context there: so all that
// is asked of a stream's events is asked on its device.
c10::Device deviceOf(const WatchedOp& op) {
  return op.stream.device();
}

// Operations in the order in which their streams run them.
class Watched {
 public:
  // wake: called on another thread once there is something to look at.
  explicit Watched(std::function<void()> wake) : wake_(std::move(wake)) {}

  void add(WatchedOp op) {
    const Key key{op.stream.device_index(), op.stream.id()};
    streams_[key].push_back(std::move(op));
  }
  bool empty() const { return streams_.empty() && draining_.empty(); }
  size_t draining() const { return draining_.size() + kept_.size(); }
  size_t size() const {
    size_t count = 0;
    for (const auto& [key, ops] : streams_) count += ops.size();
    return count;
  }

  bool look();
  bool awaitsUpdates() const;
  void lookForErrors();
  void lookForLeavers();

 private:
  using Key = std::pair<c10::DeviceIndex, c10::StreamId>;
  // No query of this thread's disturbs a capture while it lives.
  struct Relaxed {
    explicit Relaxed(const WatchedOp& any)
        : on_device(deviceOf(any), std::nothrow),
          mode(any.comm->setup().platform->cuda->relaxCapture()) {}
    OnDevice on_device;
    std::unique_ptr<CudaApi::RelaxedCapture> mode;
  };
  std::unique_ptr<Relaxed> relax() const;  // null: nothing is watched
  // By whom they were asked for in one turn.
  using Looked = std::shared_ptr<std::atomic<bool>>;
  using Looks = std::map<std::shared_ptr<ControlCommunicator>, Looked>;
  void noteFired(std::deque<WatchedOp>& ops, Looks& looks) const;
  Looked lookForUpdates(const WatchedOp& op, Looks& looks) const;
  bool completeFired(std::deque<WatchedOp>& ops);
  bool releaseCut(std::deque<WatchedOp>& ops);
  bool releaseDrained();

  const std::function<void()> wake_;
  std::map<Key, std::deque<WatchedOp>> streams_;  // states not complete
  std::vector<WatchedOp> draining_;
  std::vector<WatchedOp> kept_;  // the device cannot tell whether it is through
};

std::unique_ptr<Watched::Relaxed> Watched::relax() const {
  if (!streams_.empty()) return std::make_unique<Relaxed>(streams_.begin()->second.front());
  return draining_.empty() ? nullptr : std::make_unique<Relaxed>(draining_.front());
}

// True: something completed or was let go.
bool Watched::look() {
  const auto relaxed = relax();
  Looks looks;
  bool any = false;
  for (auto stream = streams_.begin(); stream != streams_.end();) {
    const OnDevice on_device(deviceOf(stream->second.front()), std::nothrow);
    noteFired(stream->second, looks);
    any |= completeFired(stream->second);
    any |= releaseCut(stream->second);
    stream = stream->second.empty() ? streams_.erase(stream) : std::next(stream);
  }
  any |= releaseDrained();
  return any;
}

bool Watched::awaitsUpdates() const {
  return std::any_of(streams_.begin(), streams_.end(), [](const auto& stream) {
    const auto& looked = stream.second.front().looked;
    return looked && !*looked;
  });
}

void Watched::noteFired(std::deque<WatchedOp>& ops, Looks& looks) const {
  for (WatchedOp& op : ops) {
    if (op.looked) continue;
    if (op.interrupted || fired(*op.end, *op.state->lifecycle()) != Fired::kYes) return;
    op.looked = lookForUpdates(op, looks);
  }
}

// True: there is none that has not been heard, or nobody to tell it.
Watched::Looked Watched::lookForUpdates(const WatchedOp& op, Looks& looks) const {
  const DeviceCommSetup& setup = op.comm->setup();
  const auto control = setup.size > 1 ? setup.control.lock() : nullptr;
  if (!control) return std::make_shared<std::atomic<bool>>(true);
  Looked& looked = looks[control];
  if (looked) return looked;
  looked = std::make_shared<std::atomic<bool>>(false);
  const bool asked = control->whenNoticesRead([looked = looked, wake = wake_] {
    *looked = true;
    wake();
  });
  if (!asked) *looked = true;
  return looked;
}

bool Watched::completeFired(std::deque<WatchedOp>& ops) {
  bool any = false;
  while (!ops.empty()) {
    const WatchedOp& op = ops.front();
    // In this order: an event that had fired before the communicator was closed was not freed by an
    // abort, which comes after.
    if (!op.looked || !*op.looked || op.comm->closed()) break;
    Lifecycle& lifecycle = *op.state->lifecycle();
    judge(op, lifecycle);
    const FailurePtr failure = lifecycle.failure();
    finish(op, failure);
    ops.pop_front();
    any = true;
  }
  return any;
}

bool Watched::releaseCut(std::deque<WatchedOp>& ops) {
  const auto cut = [](const WatchedOp& op) { return op.comm->cut(); };
  const auto first =
      std::stable_partition(ops.begin(), ops.end(), [&](const WatchedOp& op) { return !cut(op); });
  if (first == ops.end()) return false;
  for (auto op = first; op != ops.end(); ++op) {
    finish(*op, failureOf(*op->state->lifecycle()));
    draining_.push_back(std::move(*op));
  }
  ops.erase(first, ops.end());
  return true;
}

bool Watched::releaseDrained() {
  std::vector<WatchedOp> waiting;
  const size_t before = draining_.size();
  for (WatchedOp& op : draining_) {
    const OnDevice on_device(deviceOf(op), std::nothrow);
    switch (drained(op, *op.comm->setup().lifecycle)) {
      case Fired::kNo:
        waiting.push_back(std::move(op));
        break;
      case Fired::kUnknown:
        kept_.push_back(std::move(op));
        break;
      case Fired::kYes:
        break;
    }
  }
  draining_.swap(waiting);  // the buffers of the others go with `waiting`
  return draining_.size() < before;
}

// Of each stream only the first can be waiting for other ranks; what comes after it waits for that.
void Watched::lookForLeavers() {
  const auto relaxed = relax();
  for (auto& [key, ops] : streams_) {
    WatchedOp& op = ops.front();
    const auto& setup = op.comm->setup();
    if (!setup.left || !op.begun || op.interrupted) continue;
    const OnDevice on_device(deviceOf(op), std::nothrow);
    Lifecycle& lifecycle = *op.state->lifecycle();
    op.leavers.look(*setup.left, setup.peer, fired(*op.begun, lifecycle) == Fired::kYes, lifecycle);
  }
}

void Watched::lookForErrors() {
  std::set<DeviceComm*> busy;
  for (const auto& [key, ops] : streams_)
    for (const auto& op : ops)
      if (busy.insert(op.comm.get()).second) op.comm->lookForError();
}

// All waits hang on this thread: nothing may end it.
bool guarded(const std::function<bool()>& look) noexcept {
  try {
    return look();
  } catch (const std::exception& error) {
    log(LogLevel::kError, std::string("a look at operations on devices failed: ") + error.what());
  } catch (...) {
    log(LogLevel::kError, "a look at operations on devices failed");
  }
  return false;
}

}  // namespace

struct EventPoller::Shared : std::enable_shared_from_this<EventPoller::Shared> {
  const uint64_t fork_count = forkCount();
  mutable Mutex mutex;
  CondVar changed;
  std::vector<WatchedOp> incoming GUARDED_BY(mutex);
  bool idle GUARDED_BY(mutex) = false;  // or sleeping for long: a new operation wakes it
  bool woken GUARDED_BY(mutex) = false;
  bool stopping GUARDED_BY(mutex) = false;
  Counts counts GUARDED_BY(mutex);

  bool inherited() const { return fork_count != forkCount(); }
  bool await(Duration pause, const Watched& watched, std::vector<WatchedOp>& arrived);
  void wake();
  void run();
};

void EventPoller::Shared::wake() {
  MutexLock lock(mutex);
  woken = true;
  changed.notifyAll();
}

// Sleeps for `pause`, or while there is nothing to watch. False: stopping.
bool EventPoller::Shared::await(Duration pause, const Watched& watched,
                                std::vector<WatchedOp>& arrived) {
  const Deadline deadline = watched.empty() ? Deadline::never() : Deadline::after(pause);
  MutexLock lock(mutex);
  counts = {static_cast<int64_t>(watched.size()), static_cast<int64_t>(watched.draining())};
  idle = watched.empty() || pause > 2 * kShortest;
  while (!woken && !stopping && !deadline.expired() && (!idle || incoming.empty()))
    changed.waitUntil(mutex, deadline);
  idle = false;
  woken = false;
  arrived.swap(incoming);
  return !stopping;
}

void EventPoller::Shared::run() {
  Watched watched([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->wake();
  });
  Duration pause = kShortest;
  auto errors_looked_for = Clock::now();
  std::vector<WatchedOp> arrived;
  while (await(pause, watched, arrived)) {
    bool busy = !arrived.empty();
    for (auto& op : arrived) watched.add(std::move(op));
    arrived.clear();
    busy |= guarded([&] { return watched.look(); });
    pause = busy ? kShortest : std::min(2 * pause, kLongest);
    if (Clock::now() - errors_looked_for < kErrorInterval) continue;
    guarded([&] {
      watched.lookForErrors();
      watched.lookForLeavers();
      return true;
    });
    errors_looked_for = Clock::now();
  }
  for (auto& op : arrived) watched.add(std::move(op));
  guarded([&] { return watched.look(); });
  for (int i = 0; i < kLastLooks && watched.awaitsUpdates(); ++i) {
    std::this_thread::sleep_for(kLongest);
    guarded([&] { return watched.look(); });
  }
}

EventPoller::EventPoller()
    : shared_(std::make_shared<Shared>()),
      thread_("ft-events", [shared = shared_] { shared->run(); }) {}

EventPoller::~EventPoller() {
  stop(Deadline::after(std::chrono::seconds(1)));
}

void EventPoller::watch(WatchedOp op) {
  if (shared_->inherited()) return;
  MutexLock lock(shared_->mutex);
  shared_->incoming.push_back(std::move(op));
  if (shared_->idle) shared_->changed.notifyAll();
}

void EventPoller::wake() {
  if (!shared_->inherited()) shared_->wake();
}

bool EventPoller::stop(Deadline deadline) {
  if (shared_->inherited()) return true;
  {
    MutexLock lock(shared_->mutex);
    shared_->stopping = true;
    shared_->changed.notifyAll();
  }
  if (thread_.join(deadline)) return true;
  thread_.abandon("a query of the device does not return");
  return false;
}

bool EventPoller::isSelf() const {
  return thread_.isSelf();
}

EventPoller::Counts EventPoller::counts() const {
  MutexLock lock(shared_->mutex);
  Counts counts = shared_->counts;
  counts.watched += static_cast<int64_t>(shared_->incoming.size());
  return counts;
}

}  // namespace torchft_ext
