#include "host/shared_lane.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <new>
#include <optional>
#include <utility>

namespace torchft_ext {
namespace {

constexpr size_t kIssuersBytes = size_t{64} << 10;  // what an issue executes before it returns
constexpr size_t kNextBytes = size_t{16} << 10;   // of what follows the operation that was awaited
constexpr size_t kTurnBytes = size_t{1} << 20;    // of the loop
constexpr size_t kLookBytes = size_t{256} << 10;  // between two looks at the lifecycle
constexpr auto kTurnMayTake = std::chrono::microseconds(500);
// How long the loop looks for a peer before it lets itself be called.
constexpr auto kLookFor = std::chrono::microseconds(50);
constexpr auto kLookForWithFewCores = std::chrono::microseconds(2);
constexpr size_t kMostSpare = 16;
constexpr int kSpins = 200;
constexpr int kSpinsWithFewCores = 5;
constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

}  // namespace

SharedLane::SharedLane(std::shared_ptr<SharedMemory> memory, int rank, int size, Terms terms,
                       std::shared_ptr<Lifecycle> lifecycle, std::shared_ptr<Traffic> traffic,
                       Callbacks callbacks)
    : lifecycle_(std::move(lifecycle)),
      traffic_(std::move(traffic)),
      callbacks_(std::move(callbacks)),
      rank_(rank),
      few_cores_(terms.few_cores),
      board_(std::move(memory), rank, size, callbacks_.nudge),
      execution_(board_, rank, size, std::move(terms.plans), std::move(terms.use)),
      left_at_(static_cast<size_t>(size)),
      watched_for_(kNever) {}

// ---------------------------------------------------------------- owners

void SharedLane::add(std::shared_ptr<OpState> state, Operation operation) {
  const bool issuer_waits = operation.waited;
  state->setHelper(weak_from_this());
  bool taken = false;
  bool late = false;
  {
    MutexLock lock(mutex_);
    late = over_.load(std::memory_order_relaxed);
    if (!late) {
      if (spare_.empty()) spare_.emplace_back();
      spare_.front() = {state, std::move(operation)};
      queue_.splice(queue_.end(), spare_, spare_.begin());
      taken = !std::exchange(owned_, true);
    }
  }
  if (late) return state->complete(state->inPlace(whyOver()));
  lookWhetherWatched();
  if (!taken) return;
  board_.disarm();
  size_t budget = kIssuersBytes;
  const Stop stop = execute(&budget);
  giveBack(stop, issuer_waits);
}

void SharedLane::advance() {
  {
    MutexLock lock(mutex_);
    posted_ = false;
    asked_ = owned_;  // a nudge is not told again: the owner comes back to it
  }
  if (!take()) return;
  const Clock::time_point began = Clock::now();
  const auto look_for = few_cores_ ? kLookForWithFewCores : kLookFor;
  size_t budget = kTurnBytes;
  Stop stop = execute(&budget);
  Clock::time_point last = Clock::now();
  for (Clock::time_point now = last;
       stop == Stop::kWaits && now - began < kTurnMayTake && now - last < look_for;
       now = Clock::now()) {
    if (!execution_.mayGoOn()) continue;
    stop = execute(&budget);
    last = Clock::now();
  }
  giveBack(stop, false);
}

bool SharedLane::help(OpState& state, Deadline deadline) {
  const auto self = shared_from_this();  // the memory too
  while (!state.done() && !deadline.expired()) {
    if (isOver()) return false;
    if (take()) {
      Stop stop = executeUntil(state, deadline);
      // Others wait for this rank's part of what follows, and who returns from here computes.
      if (state.done() && stop == Stop::kTurn) {
        size_t budget = kNextBytes;
        stop = execute(&budget);
      }
      giveBack(stop, false);
      continue;
    }
    sleep(state, deadline);
  }
  // Whoever gave the lane back may have relied on this thread.
  if (!state.done() || left_to_sleepers_.load()) post();
  return state.done() || !isOver();
}

void SharedLane::sleep(const OpState& state, Deadline deadline) {
  MutexLock lock(mutex_);
  ++sleepers_;
  while (owned_ && !state.done() && !deadline.expired()) changed_.waitUntil(mutex_, deadline);
  --sleepers_;
}

// The loop comes, unless somebody else has the lane.
void SharedLane::post() noexcept {
  {
    MutexLock lock(mutex_);
    if (over_.load(std::memory_order_relaxed) || owned_ || queue_.empty() || posted_) return;
    posted_ = true;
    left_to_sleepers_ = false;
  }
  bool posted = false;
  try {
    posted = callbacks_.post();
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory: as if the loop had ended
  }
  if (posted) return;
  lifecycle_->fail(lifecycle_->ownFailure(FailureKind::kAborted, "its process is shutting down"));
  for (auto& [state, operation] : cancelAll()) state->complete(state->inPlace(whyOver()));
}

void SharedLane::lookWhetherWatched() noexcept {
  if (done_.load() < watched_for_.load()) return;
  try {
    callbacks_.exchanged();
  } catch (...) {
    lifecycle_->fail(lifecycle_->ownFailure(FailureKind::kAborted,
                                            "it ran out of memory: Cannot allocate memory"));
  }
}

bool SharedLane::take() {
  MutexLock lock(mutex_);
  if (owned_ || queue_.empty() || over_.load(std::memory_order_relaxed)) return false;
  owned_ = true;
  left_to_sleepers_ = false;
  board_.disarm();
  return true;
}

// From now on the peer that the execution waits for calls this rank's loop. False: it may go on.
bool SharedLane::arm() {
  while (true) {
    const int armed = execution_.peer();
    board_.arm(armed);
    // the second look: the peer may have come just before
    if (execution_.mayGoOn()) return false;
    if (execution_.peer() == armed) return true;
  }
}

// With something in the queue somebody has to come again.
void SharedLane::giveBack(Stop stop, bool issuer_waits) {
  const bool armed = stop == Stop::kWaits && !issuer_waits && arm();
  bool comes = armed || stop == Stop::kOver || (issuer_waits && stop != Stop::kEmpty);
  while (true) {
    std::list<Item> items;
    {
      MutexLock lock(mutex_);
      if (over_.load(std::memory_order_relaxed)) items.swap(queue_);
      if (items.empty()) {
        owned_ = false;
        if (std::exchange(asked_, false)) comes = false;
        comes = comes || queue_.empty();
        if (!comes && sleepers_ > 0) comes = left_to_sleepers_ = true;
        changed_.notifyAll();
        break;
      }
    }
    completeAll(items);
  }
  if (!comes) post();
}

// ---------------------------------------------------------------- executing

SharedLane::Item* SharedLane::front() {
  MutexLock lock(mutex_);
  return queue_.empty() ? nullptr : &queue_.front();
}

SharedLane::Stop SharedLane::execute(size_t* budget, const OpState* until) {
  while (true) {
    if (isOver()) return Stop::kOver;
    Item* item = front();
    if (item == nullptr) return Stop::kEmpty;
    std::optional<Stop> stop;
    try {
      stop = run(*item, budget);
    } catch (const std::bad_alloc&) {
      stop = fail(FailureKind::kAborted, rank_,
                  "it ran out of memory for its collective: Cannot allocate memory");
    } catch (const std::exception& thrown) {
      stop = fail(FailureKind::kInternal, rank_,
                  std::string("its collective threw: ") + thrown.what());
    }
    if (stop) return *stop;
    if (!completeFront()) return Stop::kOver;
    if (until != nullptr && until->done()) return Stop::kTurn;
  }
}

std::optional<SharedLane::Stop> SharedLane::run(Item& item, size_t* budget) {
  Operation& operation = item.operation;
  if (item.phase == Phase::kLoad) {
    if (!runAll(operation.loads, budget)) return Stop::kTurn;
    if (operation.exchanges) operation.exchanges->begin();
    item.state->noteStarted();
    item.phase = Phase::kBegin;
  }
  while (item.phase != Phase::kStore) {
    if (auto stop = exchange(item, budget)) return stop;
  }
  if (!runAll(operation.stores, budget)) return Stop::kTurn;
  return std::nullopt;
}

std::optional<SharedLane::Stop> SharedLane::exchange(Item& item, size_t* budget) {
  if (item.phase == Phase::kBegin) {
    execution_.begin(item.operation);
    item.phase = Phase::kRun;
  }
  if (item.phase == Phase::kRun) {
    const SharedExecution::State state = execution_.run(budget);
    traffic_->sent.fetch_add(execution_.takeWritten(), std::memory_order_relaxed);
    traffic_->received.fetch_add(execution_.takeRead(), std::memory_order_relaxed);
    if (state == SharedExecution::State::kWaits) return Stop::kWaits;
    if (state == SharedExecution::State::kTurn) return Stop::kTurn;
    if (state != SharedExecution::State::kDone) return failAs(state);
    item.phase = Phase::kCompute;
  }
  return afterExchange(item);
}

std::optional<SharedLane::Stop> SharedLane::afterExchange(Item& item) {
  using Kind = Exchanges::Next::Kind;
  const Exchanges::Next next =
      item.operation.exchanges ? item.operation.exchanges->next(item.operation) : Exchanges::Next{};
  switch (next.kind) {
    case Kind::kDone:
      item.phase = Phase::kStore;
      return std::nullopt;
    case Kind::kExchange:
      countExchange();
      item.phase = Phase::kBegin;
      return std::nullopt;
    case Kind::kLater:
      return Stop::kTurn;
    case Kind::kMismatch:
      return fail(FailureKind::kMismatch, next.culprit, next.how);
  }
  return std::nullopt;
}

// Blocks for others.
SharedLane::Stop SharedLane::executeUntil(const OpState& state, Deadline deadline) {
  SharedBoard::Patience patience;
  patience.spins = few_cores_ ? kSpinsWithFewCores : kSpins;
  patience.until = deadline.at();
  while (true) {
    size_t budget = kLookBytes;
    const Stop stop = execute(&budget, &state);
    if (stop == Stop::kOver || stop == Stop::kEmpty) return stop;
    if (state.done()) return Stop::kTurn;
    if (stop == Stop::kTurn) {
      if (deadline.expired()) return stop;
      continue;
    }
    const int peer = execution_.peer();
    const auto waited = board_.wait(
        peer, patience, [this, peer] { return execution_.mayGoOn() || execution_.peer() != peer; },
        [this] { return isOver(); });
    if (waited == SharedBoard::Waited::kOver) return Stop::kOver;
    if (waited == SharedBoard::Waited::kPaused) return Stop::kWaits;
  }
}

void SharedLane::countExchange() {
  done_.fetch_add(1);
  lookWhetherWatched();
}

// False: the lane is over, and nothing succeeds any more.
bool SharedLane::completeFront() {
  std::optional<Item> finished;
  {
    MutexLock lock(mutex_);
    if (over_.load(std::memory_order_relaxed)) return false;
    finished = std::move(queue_.front());
    if (spare_.size() < kMostSpare)
      spare_.splice(spare_.begin(), queue_, queue_.begin());
    else
      queue_.pop_front();
    done_.fetch_add(1);
  }
  board_.noteProgress();
  finished->state->complete(nullptr);
  lookWhetherWatched();
  finished.reset();  // its tensors, without the lock
  MutexLock lock(mutex_);
  if (sleepers_ > 0) changed_.notifyAll();
  return true;
}

void SharedLane::completeAll(const std::list<Item>& items) {
  for (const Item& item : items) item.state->complete(item.state->inPlace(whyOver()));
}

SharedLane::Stop SharedLane::failAs(SharedExecution::State state) {
  if (state == SharedExecution::State::kNoMemory) {
    return fail(FailureKind::kAborted, rank_,
                "it ran out of memory for what the members of a host share: Cannot allocate "
                "memory");
  }
  return fail(FailureKind::kMismatch, execution_.peer(), execution_.how());
}

SharedLane::Stop SharedLane::fail(FailureKind kind, int culprit, std::string how) {
  Failure failure;
  failure.kind = kind;
  failure.cause.rank = culprit;
  failure.cause.how = std::move(how);
  if (const Item* item = front()) {
    failure.op = item->state->describe();
    failure.seq = item->state->seq();
  }
  lifecycle_->fail(std::move(failure));
  return Stop::kOver;
}

FailurePtr SharedLane::whyOver() const {
  if (FailurePtr failure = lifecycle_->failure()) return failure;
  auto ended = std::make_shared<Failure>();
  ended->kind = FailureKind::kAborted;
  ended->cause.how = "the generation has ended";
  return ended;
}

// ---------------------------------------------------------------- the generation's questions

bool SharedLane::idle() const {
  MutexLock lock(mutex_);
  return queue_.empty();
}

Collectives::First SharedLane::first() const {
  MutexLock lock(mutex_);
  if (queue_.empty()) return {};
  return {queue_.front().state, queue_.front().operation.root};
}

bool SharedLane::needs(int peer) const {
  const std::optional<uint64_t>& left_at = left_at_[static_cast<size_t>(peer)];
  if (!left_at || done_.load() < *left_at) return false;
  MutexLock lock(mutex_);
  return !queue_.empty();
}

void SharedLane::peerLeft(int peer, uint64_t exchanges) {
  left_at_[static_cast<size_t>(peer)] = exchanges;
  watchFor(exchanges);
}

void SharedLane::watchFor(uint64_t exchanges) {
  watched_for_.store(std::min(watched_for_.load(), exchanges));
}

Collectives::Pending SharedLane::cancelAll() {
  Pending pending;
  {
    MutexLock lock(mutex_);
    over_.store(true, std::memory_order_release);
    if (!owned_) {
      for (Item& item : queue_)
        pending.emplace_back(std::move(item.state), std::move(item.operation));
      queue_.clear();
    }
    changed_.notifyAll();
  }
  board_.wakeExecutor();
  return pending;
}

bool SharedLane::awaitLeft(Deadline deadline) {
  MutexLock lock(mutex_);
  while (owned_ && !deadline.expired()) changed_.waitUntil(mutex_, deadline);
  return !owned_;
}

}  // namespace torchft_ext
