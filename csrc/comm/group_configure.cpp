// How a group begins a generation: the end of the last one, the rendezvous, the connections.
#include <unistd.h>

#include <utility>

#include "base/host_name.h"
#include "base/log.h"
#include "base/main_thread_waits.h"
#include "comm/dump_files.h"
#include "comm/failure_counts.h"
#include "comm/group.h"
#include "comm/member_claims.h"

namespace torchft_ext {
namespace {

// A generation that ended so recently, and not by a loss, was ended by a member that began anew.
constexpr Duration kJustEnded = std::chrono::seconds(1);

// Of a store that is slow: a few round trips are all that it takes.
constexpr Duration kLeaveStoreWithin = std::chrono::milliseconds(100);

// The generation has formed, and a member that was faster has ended it, to begin the next one
// perhaps. configure() has succeeded here too: members that do nothing but begin generation after
// generation would see every other one fail.
bool endedByAnother(const Lifecycle& generation) {
  const FailurePtr failure = generation.failure();
  return failure && failure->kind == FailureKind::kAborted && failure->cause.rank >= 0 &&
         failure->cause.rank != generation.identity().rank;
}

// Its end, or a signal's handler, which may throw.
Cancelled cancelledBy(const std::shared_ptr<Lifecycle>& lifecycle) {
  return [lifecycle] {
    runWaitHook();
    return lifecycle->over();
  };
}

MemberRecord absentSelf() {
  MemberRecord self;
  self.incarnation = Incarnation::random();
  self.token = Token::random();
  self.host = hostName();
  self.pid = ::getpid();
  return self;
}

// The phases of one configure, for stats(): each as long as it took, or until the attempt ended.
class Stopwatch {
 public:
  using Phases = std::vector<std::pair<std::string, Duration>>;

  explicit Stopwatch(Phases& phases) : phases_(phases) {}
  ~Stopwatch() { endPhase(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  void begin(std::string phase) {
    endPhase();
    phases_.emplace_back(std::move(phase), Duration::zero());
  }

 private:
  void endPhase() {
    const auto now = Clock::now();
    if (!phases_.empty()) phases_.back().second = now - last_;
    last_ = now;
  }

  Phases& phases_;
  Clock::time_point last_ = Clock::now();
};

}  // namespace

FailurePtr Group::configure(std::shared_ptr<StoreThread> store, const std::string& prefix, int rank,
                            int size, std::optional<Duration> timeout, std::string purpose) {
  const MainThreadWaits main_thread_waits;
  Deadline deadline = Deadline::never();
  std::shared_ptr<Lifecycle> lifecycle;
  AttemptMemory memory;
  {
    MutexLock lock(mutex_);
    if (shut_down_)
      throw GroupStateError("configure() of group '" + name_ +
                            "' after shutdown(): make a new group");
    if (configuring_) {
      throw GroupStateError(
          "configure() of group '" + name_ +
          "' while another thread configures it: abort() that one first, or wait for it");
    }
    configuring_ = true;
    configure_began_ = Clock::now();
    configure_limit_ = timeout.value_or(timeout_);
    deadline = Deadline::after(configure_limit_);
    lifecycle = std::make_shared<Lifecycle>(
        GenerationIdentity{name_, generation_ + 1, rank, size, job_.inJob()}, job_.successes(),
        ask_after_, recorder_);
    forming_ = lifecycle;
    memory = std::exchange(memory_, AttemptMemory{});
  }
  Attempt attempt{std::move(store),  prefix, rank, size, deadline, lifecycle, std::move(memory),
                  std::move(purpose)};
  // Also when the wait hook throws (a pending signal): the group is then failed, and whole.
  struct Finally {
    Group& group;
    Attempt& attempt;
    bool done = false;
    ~Finally() {
      if (done) return;
      group.configureFailed(
          attempt,
          attempt.lifecycle->ownFailure(FailureKind::kAborted, "configure() was interrupted"),
          /*interrupted=*/true);
    }
  } finally{*this, attempt};

  std::variant<std::shared_ptr<Communicator>, Failure> formed = beginGeneration(attempt);
  finally.done = true;
  if (auto* failure = std::get_if<Failure>(&formed))
    return configureFailed(attempt, std::move(*failure));
  return configureSucceeded(attempt, std::move(std::get<std::shared_ptr<Communicator>>(formed)));
}

std::variant<std::shared_ptr<Communicator>, Failure> Group::beginGeneration(Attempt& attempt) {
  Stopwatch stopwatch(attempt.phases);
  stopwatch.begin("end_previous");
  lookBack(attempt.memory);
  if (!endCurrent(kBeganAnother, attempt.deadline)) {
    return attempt.lifecycle->ownFailure(
        FailureKind::kTimeout, "the engine did not leave an operation of the last generation");
  }
  stopwatch.begin("rendezvous");

  if (auto failure = takeEngine(attempt)) {
    // It has no record yet. The others wait for it: they hear why it does not come.
    Rendezvous absent(attempt.store, attempt.prefix, attempt.rank, attempt.size, absentSelf(),
                      attempt.deadline, cancelledBy(attempt.lifecycle));
    if (attempt.size > 1) absent.publishFailedInit(*failure);
    return *std::move(failure);
  }
  auto described = attempt.engine->describeSelf();
  if (auto* failure = std::get_if<Failure>(&described)) return std::move(*failure);
  MemberRecord self = std::move(std::get<MemberRecord>(described));
  self.token = Token::random();
  self.purpose = attempt.purpose;

  const std::shared_ptr<Lifecycle>& lifecycle = attempt.lifecycle;
  const Cancelled cancelled = cancelledBy(lifecycle);
  attempt.rendezvous = std::make_unique<Rendezvous>(
      attempt.store, attempt.prefix, attempt.rank, attempt.size, std::move(self), attempt.deadline,
      cancelled, attempt.memory, attempt.engine->makeMemberProber(attempt.size));
  Rendezvous& rendezvous = *attempt.rendezvous;
  auto entered = rendezvous.enter();
  if (!std::holds_alternative<Failure>(entered)) {
    stopwatch.begin("connections");
    if (on_forming_) on_forming_(lifecycle);
  }
  while (true) {
    if (auto* failure = std::get_if<Failure>(&entered)) return std::move(*failure);
    std::variant<std::monostate, Roster, Failure> refreshed;
    attempt.nonce = std::get<Roster>(entered).nonce;
    auto formed = attempt.engine->form(std::get<Roster>(entered), lifecycle, attempt.deadline,
                                       [&] { return lookForSuccessor(attempt, refreshed); });
    if (auto* failure = std::get_if<Failure>(&formed)) return std::move(*failure);
    if (auto* communicator = std::get_if<std::shared_ptr<Communicator>>(&formed))
      return std::move(*communicator);
    if (auto* failure = std::get_if<Failure>(&refreshed)) return std::move(*failure);
    entered = std::get<Roster>(std::move(refreshed));
  }
}

// As another member of this process where another group of it meets there under another rank.
std::optional<Failure> Group::takeEngine(Attempt& attempt) {
  std::optional<int> wanted;
  int last = 0;
  std::shared_ptr<Engine> first;
  {
    MutexLock lock(mutex_);
    first = first_engine_;
    wanted = wanted_member_;
    last = member_;
    attempt.engine = engine_;
  }
  const int member = claimMember(attempt.store->identity() + "/" + attempt.prefix, attempt.rank,
                                 wanted, attempt.lifecycle);
  if (member != last) {
    auto made = first->forMember(member);
    if (auto* failure = std::get_if<Failure>(&made)) {
      failure->needs_new_group = false;  // another attempt may find what lacks
      return std::move(*failure);
    }
    attempt.engine = std::get<std::shared_ptr<Engine>>(std::move(made));
    if (!attempt.engine) attempt.engine = first;
  }
  std::shared_ptr<Engine> engine = attempt.engine;
  MutexLock lock(mutex_);
  if (shut_down_) return std::nullopt;
  wanted_member_ = member_ = member;
  engine_.swap(engine);  // the one before goes after the lock
  return std::nullopt;
}

void Group::letGoOfEngine() {
  std::shared_ptr<Engine> engine;  // goes after the lock
  MutexLock lock(mutex_);
  engine = first_engine_;
  member_ = 0;
  engine_.swap(engine);
}

void Group::useEngine(std::shared_ptr<Engine> engine) {
  MutexLock lock(mutex_);
  first_engine_.swap(engine);
  member_ = kNoMember;
}

// True: the connections being made are for nothing; `refreshed` says why. An end that all members
// of the attempt have to learn of fails it, so that those who are connected already are told over
// the connections.
bool Group::lookForSuccessor(Attempt& attempt,
                             std::variant<std::monostate, Roster, Failure>& refreshed) {
  runWaitHook();
  if (attempt.store_lost) {
    attempt.lifecycle->fail(*attempt.store_lost);
    return false;
  }
  refreshed = attempt.rendezvous->refresh();
  if (const auto* failure = std::get_if<Failure>(&refreshed)) {
    if (failure->kind == FailureKind::kRendezvous) return true;
    if (failure->kind == FailureKind::kStoreLost) {
      attempt.store_lost = *failure;  // finding that took long: the connections may be up by now
      return false;
    }
    attempt.lifecycle->fail(*failure);
    return false;
  }
  return std::holds_alternative<Roster>(refreshed);
}

void Group::expectMembersOf(const Group& other, const std::vector<int>& ranks) {
  AttemptMemory memory;
  memory.healthy = true;
  memory.elsewhere = true;
  const auto same_member = [&] {
    MutexLock lock(other.mutex_);
    return other.wanted_member_;
  }();
  {
    MutexLock lock(mutex_);
    wanted_member_ = same_member;
  }
  {
    MutexLock lock(other.mutex_);
    if (!other.current_.lifecycle) return;  // what is remembered is an attempt
    for (const int rank : ranks) {
      const auto index = static_cast<size_t>(rank);
      if (rank < 0 || index >= other.memory_.members.size()) return;  // not of one generation
      memory.members.push_back(other.memory_.members[index]);
    }
  }
  MutexLock lock(mutex_);
  memory_ = std::move(memory);
}

// What the last generation, or else the last attempt, says about the members.
void Group::lookBack(AttemptMemory& memory) const {
  if (memory.elsewhere) return;
  FailurePtr failure;
  bool active = false;
  bool formed = false;
  {
    MutexLock lock(mutex_);
    formed = current_.lifecycle != nullptr;
    active = formed && current_.lifecycle->state() == Lifecycle::State::kActive;
    failure = formed ? current_.lifecycle->failure() : failure_;
  }
  bool just_ended = false;
  if (failure) {
    if (formed) memory.noteFailure(*failure);
    MutexLock lock(failure_counts_->mutex);
    just_ended = !isLoss(failure->kind) && failure_counts_->last == failure &&
                 Clock::now() - failure_counts_->last_at < kJustEnded;
  }
  memory.healthy = active || (just_ended && (formed || memory.healthy));
}

// For the other members, shutdown() here is a departure.
Failure Group::asTold(const Failure& failure) const {
  Failure told = failure;
  MutexLock lock(mutex_);
  const bool own = failure.cause.rank == failure.rank;
  if (shut_down_ && own && failure.kind == FailureKind::kAborted) {
    told.kind = FailureKind::kPeerLeft;
    told.cause.how = "it shut its group down while the generation formed";
  }
  return told;
}

// A process that was stopped finds what the others left behind: nobody comes, or connections end.
// That it was left out nobody tells it, since it had no connections yet.
FailurePtr Group::inHindsight(const Attempt& attempt, FailurePtr failure) const {
  const Duration limit = engine()->frozenAfter();
  const Duration stood_still = attempt.stall_clock.longest();
  const bool puzzling =
      failure->kind == FailureKind::kTimeout || failure->kind == FailureKind::kConnectionLost;
  if (!puzzling || limit == Duration::zero() || stood_still < limit) return failure;
  auto explained = std::make_shared<Failure>(*failure);
  explained->cause.how += "; this process itself did not run for " + formatSeconds(stood_still) +
                          " meanwhile: the others may have gone on without it";
  return explained;
}

FailurePtr Group::configureFailed(Attempt& attempt, Failure failure, bool interrupted) {
  const std::shared_ptr<Lifecycle>& lifecycle = attempt.lifecycle;
  failure.op = "configure";
  LogLevel level = LogLevel::kWarning;
  {
    MutexLock lock(mutex_);
    level = level_of_failures_;
    failure.elapsed = Clock::now() - configure_began_;
    failure.limit =
        Deadline::after(configure_limit_).isNever() ? Duration::zero() : configure_limit_;
  }
  const Failure own = failure;
  lifecycle->fail(std::move(failure));
  FailurePtr known = lifecycle->failure();
  if (known->op.empty()) {
    auto placed = std::make_shared<Failure>(*known);
    placed->op = own.op;
    placed->elapsed = own.elapsed;
    placed->limit = own.limit;
    const std::string trouble = attempt.rendezvous ? attempt.rendezvous->storeTrouble() : "";
    if (placed->kind == FailureKind::kTimeout && !trouble.empty())
      placed->cause.how += "; " + trouble;
    known = std::move(placed);
  }
  if (attempt.rendezvous) attempt.memory = attempt.rendezvous->publishFailure(asTold(*known));
  known = inHindsight(attempt, std::move(known));
  log(level, known->describe());
  failure_counts_->count(known);
  struct AtEnd {
    Group& group;
    Attempt& attempt;
    const FailurePtr known;
    ~AtEnd() { group.attemptEnded(attempt, known); }
  } const at_end{*this, attempt, known};
  if (attempt.rendezvous && !interrupted) awaitReaders(attempt);
  return known;
}

// The attempt is over, and an abort() now ends the wait alone.
void Group::awaitReaders(const Attempt& attempt) {
  const auto waiting = std::make_shared<Lifecycle>(attempt.lifecycle->identity());
  {
    MutexLock lock(mutex_);
    if (shut_down_) return;
    forming_ = waiting;
  }
  attempt.rendezvous->awaitReaders(Deadline::after(Rendezvous::kReadersComeWithin),
                                   cancelledBy(waiting));
}

void Group::attemptEnded(Attempt& attempt, const FailurePtr& failure) {
  MutexLock lock(mutex_);
  memory_ = std::move(attempt.memory);
  failure_ = failure;
  rendezvous_.swap(attempt.rendezvous);
  forming_.reset();
  configuring_ = false;
  ++stats_.failed_configures;
  stats_.last_configure = std::move(attempt.phases);
}

void Group::beginRecord(const Attempt& attempt) {
  constexpr size_t kDigits = 8;  // of the nonce: enough to tell generations of one job apart
  GenerationRecord record;
  record.number = attempt.lifecycle->identity().generation;
  record.id = attempt.nonce.hex().substr(0, kDigits);
  record.rank = attempt.rank;
  record.size = attempt.size;
  for (const MemberRecord& member : attempt.memory.members)
    record.members.push_back({member.host, member.pid});
  recorder_->begin(std::move(record));
}

FailurePtr Group::configureSucceeded(Attempt& attempt, std::shared_ptr<Communicator> communicator) {
  const std::shared_ptr<Lifecycle>& lifecycle = attempt.lifecycle;
  if (!lifecycle->activate() && !endedByAnother(*lifecycle))
    return configureFailed(attempt, *lifecycle->failure());
  Duration total{0};
  for (const auto& phase : attempt.phases) total += phase.second;
  log(LogLevel::kInfo,
      "group '" + name_ + "': generation " + std::to_string(lifecycle->identity().generation) +
          " of " + std::to_string(attempt.size) + " ranks begins, this is rank " +
          std::to_string(attempt.rank) + " (" + std::to_string(toMilliseconds(total)) + " ms)");
  attempt.memory = attempt.rendezvous->formed();
  beginRecord(attempt);
  std::vector<Incarnation> incarnations;
  incarnations.reserve(attempt.memory.members.size());
  for (const MemberRecord& member : attempt.memory.members)
    incarnations.push_back(member.incarnation);
  std::unique_ptr<Rendezvous> failed;
  LogLevel level = LogLevel::kWarning;
  {
    MutexLock lock(mutex_);
    level = level_of_failures_;
    memory_ = std::move(attempt.memory);
    current_ = Generation{lifecycle, std::move(communicator)};
    failed = std::move(rendezvous_);
    forming_.reset();
    failure_.reset();
    configuring_ = false;
    ++generation_;
    rank_ = attempt.rank;
    size_ = attempt.size;
    incarnations_before_ = std::exchange(incarnations_, std::move(incarnations));
    ++stats_.generations;
    stats_.last_configure = std::move(attempt.phases);
  }
  if (failed) failed->succeeded();
  lifecycle->subscribe([counts = failure_counts_, on_failure = on_failure_, recorder = recorder_,
                        number = lifecycle->identity().generation,
                        dump_prefix = failureDumpPrefix(), level](const auto& failure) {
    counts->count(failure);
    recorder->failed(number, failure);
    dumpFailedGeneration(recorder, number, dump_prefix);
    if (on_failure) on_failure();
    log(failure->kind == FailureKind::kAborted ? LogLevel::kInfo : level, failure->describe());
  });
  attempt.rendezvous->leaveStore(kLeaveStoreWithin);
  return nullptr;
}

}  // namespace torchft_ext
