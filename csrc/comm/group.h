// One group's life through its generations: the policy that every engine shares, written once.
//
// Owner: the c10d backend. Threads: every method from any thread at any time. No lock is held while
// anything blocks. States: idle (no generation yet), configuring, active, failed, shut down.
//   configure  idle/active/failed -> configuring -> active | failed; one at a time, a second raises
//   abort      in configuring: that attempt fails, and the generation that it is still ending;
//              active: the generation fails; else nothing
//   issue      active: runs; else: an operation that has already failed
//   shutdown   final; configure after it raises, unless reopen() was called
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "comm/communicator.h"
#include "comm/issue_order.h"
#include "comm/job_membership.h"
#include "comm/operation_numbering.h"
#include "comm/operation_recorder.h"
#include "comm/stall_clock.h"
#include "comm/watchdog.h"

namespace torchft_ext {

struct FailureCounts;

struct GroupStats {
  uint64_t generations = 0;
  uint64_t failed_configures = 0;
  uint64_t operations = 0;  // issued; the sum of those by kind
  std::array<uint64_t, kOpKinds> operations_by_kind{};
  OperationTotals totals{};
  std::array<uint64_t, 10> failures{};  // by FailureKind
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  FailurePtr last_failure;
  std::vector<Duration> waited_for{};  // by rank of the current generation; empty: none, or unknown
  std::string why_over_sockets{};      // as the current generation's communicator says
  // Phases of the last configure, in order: end_previous, rendezvous, connections; of one that
  // failed up to the one in which it did.
  std::vector<std::pair<std::string, Duration>> last_configure;
};

// Ranks of a generation at most: what compares operations of ranks has 16 bits for a root.
inline constexpr int kMostRanks = 1 << 16;

// The calls of a group that has been shut down, or a second configure() at the same time.
class GroupStateError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

class Group {
 public:
  using OnForming = std::function<void(const std::shared_ptr<Lifecycle>&)>;

  // on_failure: called once for each generation that fails, on the thread that fails it.
  // on_forming: once for each whose members have met, before the engine knows of it: who subscribes
  // there hears of a failure first. Neither may block or throw; both may be empty.
  Group(std::string name, std::shared_ptr<Engine> engine, std::shared_ptr<Watchdog> watchdog,
        Duration timeout, std::function<void()> on_failure = nullptr,
        OnForming on_forming = nullptr);
  ~Group();  // fails the generation, cuts; does not wait

  // Begins a new generation. Null: success. Otherwise why not: the group is failed with it, and
  // whole. Blocks until the deadline at most (the default timeout's, if timeout is nullopt); calls
  // the wait hook. purpose: what this member comes for; all members come for the same, or the
  // attempt fails, and its failure names two that do not.
  FailurePtr configure(std::shared_ptr<StoreThread> store, const std::string& prefix, int rank,
                       int size, std::optional<Duration> timeout = std::nullopt,
                       std::string purpose = {});

  // Before a configure(): its members are those of `other`'s generation that have these
  // ranks there. So the end of one of them is told while the others still wait for it. This one is
  // the same member of this process in both.
  void expectMembersOf(const Group& other, const std::vector<int>& ranks);

  // Idempotent. Releases every waiter at once, then waits until no engine thread is inside a user
  // buffer (50 ms; if it stays longer, up to the group's timeout, and the log says so).
  void abort(const std::string& why);
  // The same, if that is the current generation; an attempt to form another is left alone.
  void abortGeneration(int64_t generation, const std::string& why);
  // Of several groups: the first half of each of these, which releases all waiters and waits for
  // nothing.
  void beginAbort(const std::string& why);
  void beginAbortGeneration(int64_t generation, const std::string& why);

  // Another one from the next generation on, of the same kind, and with other network options.
  void useEngine(std::shared_ptr<Engine> engine);
  // From the next generation on its failures are no warnings in the log: whoever owns the group
  // hears of them by its operations, and knows which of them somebody asked for.
  void leaveWarningsToOwner();
  // Of generations that begin from now on.
  void setJob(JobMembership job);
  JobMembership job() const;
  std::shared_ptr<OpState> issue(Operation operation);
  // Operations that begin as one, in this order. All or none belong to the current generation.
  std::vector<std::shared_ptr<OpState>> issueTogether(std::vector<Operation> operations);
  // Waits until everything issued in the current generation is complete. Null: it is, and the
  // generation stands. Otherwise the generation's failure, or a timeout by the deadline (which
  // fails the generation).
  FailurePtr check(Deadline deadline);
  // Says goodbye and ends the generation. True: everything sent by the deadline.
  bool shutdown(Deadline deadline);
  // After shutdown(): configure() may follow after all.
  void reopen();
  bool isShutDown() const;

  // Whether its operations are under way in one of these generations.
  bool isIn(const std::vector<std::shared_ptr<Lifecycle>>& generations) const;

  FailurePtr errored() const;  // the current generation's (or last configure's) failure
  int64_t generation() const;  // 0: none yet
  int rank() const;            // of the last generation that was active
  int size() const;
  // The processes of the last generation that was active, and of the one before it, by rank there.
  // Empty: none.
  std::vector<Incarnation> incarnations() const;
  std::vector<Incarnation> incarnationsBefore() const;
  Duration timeout() const;
  void setTimeout(Duration timeout);  // of later operations and configures
  // From the next generation on: how long an operation waits before its rank asks what the others
  // do. Zero: never.
  void setAskAfter(Duration ask_after);
  GroupStats stats() const;
  // Of its last generation, or attempt at one.
  std::shared_ptr<Engine> engine() const;
  const std::string& name() const { return name_; }

 private:
  static constexpr int kNoMember = -1;

  struct Generation {
    std::shared_ptr<Lifecycle> lifecycle;
    std::shared_ptr<Communicator> communicator;
    OperationNumbering numbering{};
    // Held while operations are handed to the communicator, so that the order of sequence numbers
    // is the order of issue.
    std::shared_ptr<IssueOrders> orders = std::make_shared<IssueOrders>();
  };

  // What one configure() works with.
  struct Attempt {
    std::shared_ptr<StoreThread> store;
    const std::string& prefix;
    int rank;
    int size;
    Deadline deadline;
    std::shared_ptr<Lifecycle> lifecycle;
    AttemptMemory memory{};
    std::string purpose{};
    std::shared_ptr<Engine> engine{};  // null: not known yet
    Nonce nonce{};                     // of the generation, once its members have met
    StallClock stall_clock{};
    std::vector<std::pair<std::string, Duration>> phases{};
    std::unique_ptr<Rendezvous> rendezvous{};
    std::optional<Failure> store_lost{};  // while connections are made
  };

  std::variant<std::shared_ptr<Communicator>, Failure> beginGeneration(Attempt& attempt);
  std::optional<Failure> takeEngine(Attempt& attempt);
  void letGoOfEngine();
  static bool lookForSuccessor(Attempt& attempt,
                               std::variant<std::monostate, Roster, Failure>& refreshed);
  void lookBack(AttemptMemory& memory) const;
  // interrupted: by an exception, which may be under way.
  FailurePtr configureFailed(Attempt& attempt, Failure failure, bool interrupted = false);
  void attemptEnded(Attempt& attempt, const FailurePtr& failure);
  void awaitReaders(const Attempt& attempt);
  Failure asTold(const Failure& failure) const;
  FailurePtr inHindsight(const Attempt& attempt, FailurePtr failure) const;
  FailurePtr configureSucceeded(Attempt& attempt, std::shared_ptr<Communicator> communicator);
  void beginRecord(const Attempt& attempt);
  // Whose operations may still be under way: the current one, or that which configure() is ending.
  Generation lastLocked() const REQUIRES(mutex_);
  struct Aborted {
    Generation generation;  // without a communicator: there is none
    Duration limit{0};
  };
  Aborted failUnderWay(std::optional<int64_t> generation, const std::string& why);
  void finishAbort(const Aborted& aborted);
  // What shutdown() leaves; why_early: of a generation that said no goodbye.
  void endLast(const Generation& last, const std::string& why_early);
  // False: the engine is still inside an operation at the deadline, which drain() has logged.
  bool endCurrent(const std::string& why, Deadline deadline);
  bool drain(Communicator& communicator, Deadline deadline);
  FailurePtr whyNoGeneration() const REQUIRES(mutex_);
  FailurePtr adviseLocked(FailurePtr failure) const REQUIRES(mutex_);
  // Operations about to be issued as one, and a state for each: made here.
  using States = std::span<std::shared_ptr<OpState>>;
  void issueAll(std::span<Operation> operations, States states);
  // Returns the communicator that takes them. Null: none does, and the states are complete.
  std::shared_ptr<Communicator> enterLocked(std::span<Operation> operations, States states)
      REQUIRES(mutex_);
  std::shared_ptr<Lifecycle> noLifecycleLocked(bool attempt_failed) const REQUIRES(mutex_);
  void record(const Operation& operation, OpState& state) const;
  // Empty: not by the deadline, or the generation is over.
  std::optional<IssueOrders::Turn> awaitTurn(std::span<const Operation> operations,
                                             IssueOrders& orders,
                                             const std::shared_ptr<Lifecycle>& lifecycle) const;
  Deadline deadlineOf(std::span<const Operation> operations) const;

  const std::string name_;
  const std::shared_ptr<Watchdog> watchdog_;
  const std::shared_ptr<FailureCounts> failure_counts_;
  const std::shared_ptr<OperationRecorder> recorder_;
  const std::function<void()> on_failure_;
  const OnForming on_forming_;

  mutable Mutex mutex_;
  // Which member of this process it last was, or is to be first.
  std::optional<int> wanted_member_ GUARDED_BY(mutex_);
  // Whose engine_ is. kNoMember: the next attempt takes another one.
  int member_ GUARDED_BY(mutex_) = 0;
  std::shared_ptr<Engine> first_engine_ GUARDED_BY(mutex_);  // of this process's first member
  std::shared_ptr<Engine> engine_ GUARDED_BY(mutex_) = first_engine_;  // that member's
  Generation current_ GUARDED_BY(mutex_);
  Generation ending_ GUARDED_BY(mutex_);  // while configure() ends it; then there is no current one
  std::shared_ptr<Lifecycle> forming_ GUARDED_BY(mutex_);
  FailurePtr failure_ GUARDED_BY(mutex_);
  // Of the last attempt, if it failed: its keys are deleted when the next one is over, since slower
  // members may still read them.
  std::unique_ptr<Rendezvous> rendezvous_ GUARDED_BY(mutex_);
  AttemptMemory memory_ GUARDED_BY(mutex_);  // empty while configure() works with it
  Clock::time_point configure_began_ GUARDED_BY(mutex_);
  Duration configure_limit_ GUARDED_BY(mutex_){0};
  bool configuring_ GUARDED_BY(mutex_) = false;
  bool shut_down_ GUARDED_BY(mutex_) = false;
  LogLevel level_of_failures_ GUARDED_BY(mutex_) = LogLevel::kWarning;
  JobMembership job_ GUARDED_BY(mutex_);
  int64_t generation_ GUARDED_BY(mutex_) = 0;
  int rank_ GUARDED_BY(mutex_) = 0;
  int size_ GUARDED_BY(mutex_) = 1;
  std::vector<Incarnation> incarnations_ GUARDED_BY(mutex_);
  std::vector<Incarnation> incarnations_before_ GUARDED_BY(mutex_);
  Duration timeout_ GUARDED_BY(mutex_);
  Duration ask_after_ GUARDED_BY(mutex_) = kAskAfter;
  GroupStats stats_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
