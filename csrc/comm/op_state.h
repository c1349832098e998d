// The completion of one operation, separate from its buffers: what a Work waits on.
//
// Owner: shared by the engine (until it completes it) and any number of Works. Completed exactly
// once; later attempts are ignored. Completed only when the engine is out of the operation's
// buffers (promise 6), or, past the grace after its deadline, by a waiter that gives up: then the
// buffers stay with the engine. Threads: any. wait() is the only call that blocks;
// where the engine gave it a helper, it executes the operation meanwhile.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "comm/callback_path.h"
#include "comm/lifecycle.h"
#include "comm/operation.h"

namespace torchft_ext {

// Called by waits every 50 ms or so on the waiting thread, with no lock held. May throw (a pending
// signal): the exception leaves the wait.
using WaitHook = void (*)();
void setWaitHook(WaitHook hook);  // nullptr: none
void runWaitHook();               // if there is one
inline constexpr Duration kHookInterval = std::chrono::milliseconds(50);

class OpState;

// Has an operation executed by the threads that wait for it. Owner: an engine, or several. Threads:
// any.
class OpHelper {
 public:
  virtual ~OpHelper() = default;
  // Executes until it is done, or the deadline. False: it has no part in it any more. Blocks.
  virtual bool help(OpState& state, Deadline deadline) = 0;
};

class OpState {
 public:
  // seq: kNoSeq of collectives that a callback has issued, which have no place in the order.
  static constexpr int64_t kNoSeq = -1;
  enum class Whose { kUsers, kEngines };
  // whose: successes of the engine's own transfers are no progress of the user's.
  // path: of collectives on host memory; what callbacks of their futures issue is named after it.
  OpState(std::shared_ptr<Lifecycle> lifecycle, OpKind kind, int64_t seq, Duration timeout,
          std::optional<CallbackPath> path = std::nullopt, Whose whose = Whose::kUsers);

  OpKind kind() const { return kind_; }
  int64_t seq() const { return seq_; }
  const std::optional<CallbackPath>& path() const { return path_; }
  // For errors: "allreduce", "allreduce issued in a callback of broadcast #3".
  std::string describe() const;
  Deadline deadline() const { return deadline_; }
  Clock::time_point issuedAt() const { return issued_at_; }
  Duration timeout() const { return timeout_; }
  // When its rank begins to ask what the others do: askAfter() of the generation, or half of its
  // limit where that is less. The end of time: never.
  Clock::time_point askAt() const;
  const std::shared_ptr<Lifecycle>& lifecycle() const { return lifecycle_; }

  bool done() const { return done_.load(std::memory_order_acquire); }
  FailurePtr failure() const;            // null: not done, or success
  std::optional<Duration> took() const;  // from issue to completion; nullopt: not done
  int sourceRank() const { return source_rank_.load(std::memory_order_acquire); }
  void setSourceRank(int rank) { source_rank_.store(rank, std::memory_order_release); }

  // Null: success. The failure is completed with op, seq, elapsed and limit.
  void complete(FailurePtr failure);
  // True: done. Returns false at the deadline.
  bool wait(Deadline deadline);
  // Of a collective that all ranks issue in one order: its place there, else kNoPlace.
  // Set once, before others know this state.
  uint64_t place() const { return place_; }
  void setPlace(uint64_t place) { place_ = place; }
  // The ranks that it waits for, and what is known of them: "rank 3 (host b, pid 812): its last
  // operation is ...". Empty: all have issued it. nullopt: nobody has asked.
  std::optional<std::string> waitedFor() const;
  void setWaitedFor(std::string waited_for, const std::vector<int>& ranks);
  // The same as the end of a sentence about its timeout.
  std::string whyItWaited() const;
  // Waits call it from now on. Once, before others know this state.
  void setHelper(std::weak_ptr<OpHelper> helper) { helper_ = std::move(helper); }
  // What becomes of it is entered in the generation's recorder, under this number. Once, before
  // others know this state.
  void recordAs(uint64_t number) { recorded_as_ = number; }
  // The engine begins it, or has handed it to its device. Any thread, not twice at a time.
  void noteStarted();
  // Runs on a callback thread once done (also when done already). They begin in the order in which
  // operations end; one that waits is overtaken.
  void onDone(std::function<void()> callback);
  // The same, on the thread that completes it, which may be the engine's (the caller's where it is
  // done already): it must not block.
  void onDoneAtOnce(std::function<void()> callback);

  // A failure as seen from this operation: the generation's, with this operation's place filled in.
  FailurePtr inPlace(const FailurePtr& generation_failure) const;

 private:
  using Callbacks = std::vector<std::function<void()>>;

  OperationRecorder* recorder() const;  // null: it is not recorded
  bool helped(Deadline slice);
  // False: it is done, and they are not called any more.
  bool keep(std::function<void()>& callback, Callbacks OpState::*callbacks) EXCLUDES(mutex_);

  const std::shared_ptr<Lifecycle> lifecycle_;
  const OpKind kind_;
  const int64_t seq_;
  const Duration timeout_;
  const Clock::time_point issued_at_;
  const Deadline deadline_;
  const std::optional<CallbackPath> path_;
  const Whose whose_;
  std::weak_ptr<OpHelper> helper_;  // set by its issuer alone
  uint64_t place_ = kNoPlace;       // likewise
  uint64_t recorded_as_ = 0;        // likewise; 0: it is not recorded
  std::atomic<bool> done_{false};   // written under mutex_
  std::atomic<int> source_rank_{-1};
  mutable Mutex mutex_;
  CondVar changed_;
  FailurePtr failure_ GUARDED_BY(mutex_);
  std::optional<std::string> waited_for_ GUARDED_BY(mutex_);
  Clock::time_point done_at_ GUARDED_BY(mutex_);
  Callbacks callbacks_ GUARDED_BY(mutex_);
  Callbacks callbacks_at_once_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
