#include "comm/group.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/main_thread_waits.h"
#include "comm/dump_files.h"
#include "comm/failure_counts.h"

namespace torchft_ext {
namespace {

constexpr Duration kDrainSoon = std::chrono::milliseconds(50);
constexpr Duration kFlushWithin = std::chrono::milliseconds(50);

Failure withoutGroup(const Lifecycle& lifecycle, std::string how) {
  Failure failure = lifecycle.ownFailure(FailureKind::kAborted, std::move(how));
  failure.needs_new_group = true;
  return failure;
}

}  // namespace

Group::Group(std::string name, std::shared_ptr<Engine> engine, std::shared_ptr<Watchdog> watchdog,
             Duration timeout, std::function<void()> on_failure, OnForming on_forming)
    : name_(std::move(name)),
      watchdog_(std::move(watchdog)),
      failure_counts_(std::make_shared<FailureCounts>()),
      recorder_(
          std::make_shared<OperationRecorder>(name_, OperationRecorder::capacityFromEnvironment())),
      on_failure_(std::move(on_failure)),
      on_forming_(std::move(on_forming)),
      first_engine_(std::move(engine)),
      timeout_(timeout) {
  rememberRecorder(recorder_);
}

Group::~Group() {
  std::shared_ptr<Lifecycle> forming;
  {
    MutexLock lock(mutex_);
    forming = forming_;
  }
  if (forming) forming->fail(withoutGroup(*forming, "its group object was destroyed"));
}

// ---------------------------------------------------------------- ends

bool Group::endCurrent(const std::string& why, Deadline deadline) {
  Generation ended;
  {
    MutexLock lock(mutex_);
    ended = ending_ = std::exchange(current_, Generation{});
  }
  if (!ended.communicator) return true;
  struct Ended {  // also when the wait hook throws
    Group& group;
    ~Ended() {
      MutexLock lock(group.mutex_);
      group.ending_ = Generation{};  // `ended` holds it still
    }
  } const at_end{*this};
  // Others may still be at the last operation that succeeded here: they get its bytes.
  if (!ended.communicator->leaveForAnother(deadline.orEarlier(kFlushWithin)))
    ended.lifecycle->fail(ended.lifecycle->ownFailure(FailureKind::kAborted, why));
  if (!drain(*ended.communicator, deadline)) return false;
  const uint64_t sent = ended.communicator->bytesSent();
  const uint64_t received = ended.communicator->bytesReceived();
  MutexLock lock(mutex_);
  stats_.bytes_sent += sent;
  stats_.bytes_received += received;
  return true;
}

bool Group::drain(Communicator& communicator, Deadline deadline) {
  if (communicator.drain(deadline.orEarlier(kDrainSoon))) return true;
  log(LogLevel::kWarning,
      "group '" + name_ + "': the engine is still inside an operation 50 ms after its end");
  while (!communicator.drain(deadline.orEarlier(kHookInterval)) && !deadline.expired()) {
    runWaitHook();
  }
  if (communicator.drain(Deadline::after(Duration::zero()))) return true;
  log(LogLevel::kError,
      "group '" + name_ +
          "': the engine did not leave an operation by the deadline; its buffers stay alive");
  return false;
}

Group::Generation Group::lastLocked() const {
  return current_.communicator ? current_ : ending_;
}

// What is under way, of that generation alone if one is given.
Group::Aborted Group::failUnderWay(std::optional<int64_t> generation, const std::string& why) {
  std::shared_ptr<Lifecycle> forming;
  Aborted aborted;
  {
    MutexLock lock(mutex_);
    if (!generation) forming = forming_;
    if (!generation || *generation == generation_) aborted.generation = lastLocked();
    aborted.limit = timeout_;
  }
  if (forming) forming->fail(forming->ownFailure(FailureKind::kAborted, why));
  if (aborted.generation.communicator) {
    Lifecycle& lifecycle = *aborted.generation.lifecycle;
    lifecycle.fail(lifecycle.ownFailure(FailureKind::kAborted, why));
  }
  return aborted;
}

void Group::finishAbort(const Aborted& aborted) {
  if (!aborted.generation.communicator) return;
  drain(*aborted.generation.communicator, Deadline::after(aborted.limit));
}

void Group::beginAbort(const std::string& why) {
  failUnderWay(std::nullopt, why);
}

void Group::beginAbortGeneration(int64_t generation, const std::string& why) {
  failUnderWay(generation, why);
}

void Group::abort(const std::string& why) {
  finishAbort(failUnderWay(std::nullopt, why));
}

void Group::abortGeneration(int64_t generation, const std::string& why) {
  finishAbort(failUnderWay(generation, why));
}

void Group::leaveWarningsToOwner() {
  MutexLock lock(mutex_);
  level_of_failures_ = LogLevel::kInfo;
}

void Group::setJob(JobMembership job) {
  MutexLock lock(mutex_);
  std::swap(job_, job);
}

JobMembership Group::job() const {
  MutexLock lock(mutex_);
  return job_;
}

bool Group::shutdown(Deadline deadline) {
  const MainThreadWaits main_thread_waits;
  struct LetGo {  // also when the wait hook throws
    Group& group;
    ~LetGo() { group.letGoOfEngine(); }
  };
  Generation last;
  std::shared_ptr<Lifecycle> forming;
  {
    MutexLock lock(mutex_);
    shut_down_ = true;
    forming = forming_;
    last = lastLocked();
  }
  const LetGo at_end{*this};
  if (forming) forming->fail(withoutGroup(*forming, "shutdown() was called"));
  if (!last.communicator) return true;
  try {
    const bool left = last.communicator->leave(deadline);
    endLast(last, left ? "" : "shutdown() ran out of time with operations pending");
    return left;
  } catch (...) {  // a signal's handler threw
    endLast(last, "shutdown() was interrupted");
    throw;
  }
}

void Group::reopen() {
  MutexLock lock(mutex_);
  shut_down_ = false;
}

bool Group::isShutDown() const {
  MutexLock lock(mutex_);
  return shut_down_;
}

void Group::endLast(const Generation& last, const std::string& why_early) {
  if (!why_early.empty()) last.lifecycle->fail(withoutGroup(*last.lifecycle, why_early));
  drain(*last.communicator, Deadline::after(kDrainSoon));
  std::unique_ptr<Rendezvous> ended;
  MutexLock lock(mutex_);
  ended = std::move(rendezvous_);
}

// ---------------------------------------------------------------- operations

FailurePtr Group::whyNoGeneration() const {
  auto failure = std::make_shared<Failure>();
  failure->kind = FailureKind::kAborted;
  failure->group = name_;
  failure->generation = generation_;
  failure->rank = rank_;
  failure->size = size_;
  failure->needs_new_group = shut_down_;
  failure->in_job = job_.inJob();
  failure->cause.how = shut_down_         ? "the group was shut down"
                       : configuring_     ? "another thread is configuring the group"
                       : generation_ == 0 ? "the group has no generation yet"
                       : current_.communicator
                           ? "it belongs to a generation that is over: another one has begun"
                           : "the last configure() failed";
  return failure;
}

// Judged once for all of them: a batch that straddles two generations, or the end of one, is
// refused as a whole, since the half of it would leave other ranks waiting.
std::shared_ptr<Communicator> Group::enterLocked(std::span<Operation> operations, States states) {
  auto communicator = shut_down_ ? nullptr : current_.communicator;
  const bool attempt_failed = !communicator && failure_ && !shut_down_ && !configuring_;
  const auto lifecycle = communicator ? current_.lifecycle : noLifecycleLocked(attempt_failed);
  const bool laid_out_for_another = std::any_of(
      operations.begin(), operations.end(), [generation = generation_](const Operation& each) {
        return each.generation >= 0 && each.generation != generation;
      });
  FailurePtr refusal;
  if (!communicator) {
    refusal = attempt_failed ? failure_ : whyNoGeneration();
  } else if (laid_out_for_another) {
    refusal = whyNoGeneration();
  } else {
    refusal = lifecycle->failure();
  }
  for (size_t i = 0; i < operations.size(); ++i) {
    Operation& operation = operations[i];
    ++stats_.operations_by_kind[static_cast<size_t>(operation.kind)];
    if (operation.timeout <= Duration::zero()) operation.timeout = timeout_;
    // One for another generation takes no place in this one's order, which is the same on all
    // ranks.
    states[i] = laid_out_for_another ? std::make_shared<OpState>(lifecycle, operation.kind,
                                                                 OpState::kNoSeq, operation.timeout)
                                     : current_.numbering.stateOf(operation, lifecycle);
    if (refusal)
      states[i]->complete(refusal);
    else
      record(operation, *states[i]);
  }
  return refusal ? nullptr : communicator;
}

// Of operations without a communicator. Ranks in a failure are those of the generation, or of the
// attempt, that failed.
std::shared_ptr<Lifecycle> Group::noLifecycleLocked(bool attempt_failed) const {
  if (attempt_failed)
    return std::make_shared<Lifecycle>(GenerationIdentity{
        name_, failure_->generation, failure_->rank, failure_->size, job_.inJob()});
  return std::make_shared<Lifecycle>(
      GenerationIdentity{name_, generation_, rank_, size_, job_.inJob()});
}

// A watch for leavers is no operation of the program's.
void Group::record(const Operation& operation, OpState& state) const {
  if (operation.watches) return;
  const int64_t generation = state.lifecycle()->identity().generation;
  state.recordAs(
      recorder_->issued(operation, generation, state.seq(), state.issuedAt(), state.place()));
}

std::optional<IssueOrders::Turn> Group::awaitTurn(
    std::span<const Operation> operations, IssueOrders& orders,
    const std::shared_ptr<Lifecycle>& lifecycle) const {
  const auto on_device = [](const Operation& each) { return each.device != nullptr; };
  const bool host = !std::all_of(operations.begin(), operations.end(), on_device);
  const bool device = std::any_of(operations.begin(), operations.end(), on_device);
  if (auto turn = orders.tryEnter(host, device)) return turn;
  return orders.enter(host, device, deadlineOf(operations),
                      [&] { return lifecycle && lifecycle->over(); });
}

Deadline Group::deadlineOf(std::span<const Operation> operations) const {
  const Duration usual = timeout();
  Deadline first = Deadline::never();
  for (const Operation& each : operations)
    first = first.orEarlier(each.timeout > Duration::zero() ? each.timeout : usual);
  return first;
}

std::shared_ptr<OpState> Group::issue(Operation operation) {
  std::shared_ptr<OpState> state;
  issueAll({&operation, 1}, {&state, 1});
  return state;
}

std::vector<std::shared_ptr<OpState>> Group::issueTogether(std::vector<Operation> operations) {
  std::vector<std::shared_ptr<OpState>> states(operations.size());
  issueAll(operations, states);
  return states;
}

void Group::issueAll(std::span<Operation> operations, States states) {
  while (true) {
    std::shared_ptr<IssueOrders> orders;
    std::shared_ptr<Lifecycle> lifecycle;
    {
      MutexLock lock(mutex_);
      orders = current_.orders;
      lifecycle = current_.lifecycle;
    }
    const auto turn = awaitTurn(operations, *orders, lifecycle);
    if (!turn && lifecycle)
      lifecycle->fail(lifecycle->ownFailure(
          FailureKind::kTimeout,
          "an operation was not issued within its limit: another thread's of this group, which "
          "waits for other ranks, was before it"));
    std::shared_ptr<Communicator> communicator;
    {
      MutexLock lock(mutex_);
      if (orders != current_.orders) continue;  // another generation began meanwhile
      communicator = enterLocked(operations, states);
    }
    if (!communicator) return;
    for (const auto& state : states) watchdog_->watch(state);
    if (operations.size() == 1)
      return communicator->issue(states.front(), std::move(operations.front()));
    std::vector<Communicator::Issue> issues;
    issues.reserve(operations.size());
    for (size_t i = 0; i < operations.size(); ++i) {
      issues.push_back({states[i], std::move(operations[i])});
    }
    return communicator->issueTogether(std::move(issues));
  }
}

FailurePtr Group::check(Deadline deadline) {
  const MainThreadWaits main_thread_waits;
  Generation current;
  {
    MutexLock lock(mutex_);
    if (!current_.communicator) return failure_ ? adviseLocked(failure_) : whyNoGeneration();
    current = current_;
  }
  if (!current.communicator->awaitIssued(deadline)) {
    Failure failure = current.lifecycle->ownFailure(
        FailureKind::kTimeout, "check() ran out of time with operations pending");
    failure.op = "check";
    current.lifecycle->fail(std::move(failure));
  }
  // Waits for nothing: what the caller enqueues next comes behind operations that have failed.
  if (current.lifecycle->failure()) current.communicator->drain(Deadline::after(Duration::zero()));
  MutexLock lock(mutex_);
  return adviseLocked(current.lifecycle->failure());
}

// configure() follows on any failure but in a group that was shut down.
FailurePtr Group::adviseLocked(FailurePtr failure) const {
  if (!failure || !shut_down_ || failure->needs_new_group) return failure;
  auto advised = std::make_shared<Failure>(*failure);
  advised->needs_new_group = true;
  return advised;
}

// ---------------------------------------------------------------- state

bool Group::isIn(const std::vector<std::shared_ptr<Lifecycle>>& generations) const {
  MutexLock lock(mutex_);
  const auto& own = lastLocked().lifecycle;
  return std::find(generations.begin(), generations.end(), own) != generations.end();
}

FailurePtr Group::errored() const {
  MutexLock lock(mutex_);
  return adviseLocked(current_.lifecycle ? current_.lifecycle->failure() : failure_);
}

std::shared_ptr<Engine> Group::engine() const {
  MutexLock lock(mutex_);
  return engine_;
}

int64_t Group::generation() const {
  MutexLock lock(mutex_);
  return generation_;
}

int Group::rank() const {
  MutexLock lock(mutex_);
  return rank_;
}

int Group::size() const {
  MutexLock lock(mutex_);
  return size_;
}

std::vector<Incarnation> Group::incarnations() const {
  MutexLock lock(mutex_);
  return incarnations_;
}

std::vector<Incarnation> Group::incarnationsBefore() const {
  MutexLock lock(mutex_);
  return incarnations_before_;
}

Duration Group::timeout() const {
  MutexLock lock(mutex_);
  return timeout_;
}

void Group::setTimeout(Duration timeout) {
  MutexLock lock(mutex_);
  timeout_ = timeout;
}

void Group::setAskAfter(Duration ask_after) {
  MutexLock lock(mutex_);
  ask_after_ = ask_after;
}

GroupStats Group::stats() const {
  GroupStats stats;
  std::shared_ptr<Communicator> communicator;
  {
    MutexLock lock(mutex_);
    stats = stats_;
    communicator = current_.communicator;
  }
  for (const uint64_t of_kind : stats.operations_by_kind) stats.operations += of_kind;
  stats.totals = recorder_->totals();
  {
    MutexLock lock(failure_counts_->mutex);
    stats.failures = failure_counts_->by_kind;
    stats.last_failure = failure_counts_->last;
  }
  if (communicator) {
    stats.bytes_sent += communicator->bytesSent();
    stats.bytes_received += communicator->bytesReceived();
    stats.waited_for = communicator->waitedFor();
    stats.why_over_sockets = communicator->whyOverSockets();
  }
  return stats;
}

}  // namespace torchft_ext
