// The state of one generation, its first error, and where its operations are recorded. Small and
// shared: held by communicator, works, watchdog and peer monitor, none of which holds another
// through it.
//
// States: forming -> active -> ended; forming or active -> failed. failed and ended are final.
// Threads: any. Never blocks, never throws, takes no lock while it calls a subscriber.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

// How the failure of members that still needed one says that it went on to another generation.
inline constexpr const char* kBeganAnother = "it began another generation";

struct GenerationIdentity {
  std::string group;
  int64_t generation = 0;
  int rank = 0;
  int size = 1;
  InJob in_job = InJob::kNo;
};

class OpState;
class OperationRecorder;

// How long an operation waits before its rank asks what the others do, where nothing else is said.
inline constexpr Duration kAskAfter = std::chrono::seconds(1);

// How many operations have succeeded here, of all groups that share it. Any thread.
using SuccessCount = std::atomic<uint64_t>;

class Lifecycle {
 public:
  enum class State { kForming, kActive, kFailed, kEnded };
  using Subscription = uint64_t;
  using OnFailed = std::function<void(const FailurePtr&)>;

  using Operations = std::vector<std::shared_ptr<OpState>>;
  using OnWaits = std::function<void(const Operations&)>;

  // successes: counted there; null: not counted. ask_after: zero: never. recorder: the group's;
  // null: operations are not recorded.
  explicit Lifecycle(GenerationIdentity identity, std::shared_ptr<SuccessCount> successes = nullptr,
                     Duration ask_after = kAskAfter,
                     std::shared_ptr<OperationRecorder> recorder = nullptr)
      : identity_(std::move(identity)),
        ask_after_(ask_after),
        recorder_(std::move(recorder)),
        successes_(std::move(successes)) {}

  const GenerationIdentity& identity() const { return identity_; }
  State state() const { return state_.load(std::memory_order_acquire); }
  bool over() const { return state() >= State::kFailed; }
  // Set at once with kFailed; null in every other state.
  FailurePtr failure() const;

  // What this process brings about itself: to be completed, and given to fail().
  Failure ownFailure(FailureKind kind, std::string how) const;

  bool activate();  // forming -> active; false: it is already over
  // The first failure wins and is kept, completed with this generation's identity; subscribers are
  // called on this thread. False: the generation was already over; the failure is dropped.
  bool fail(Failure failure);
  bool end();  // a clean end (goodbye said); false: it had already failed

  // An operation of the user's in this generation has succeeded here.
  void noteSuccess() const {
    if (successes_) successes_->fetch_add(1, std::memory_order_relaxed);
  }

  const std::shared_ptr<OperationRecorder>& recorder() const { return recorder_; }  // may be null

  Duration askAfter() const { return ask_after_; }
  // Called about once a second while operations wait for longer than askAfter(), with all of them:
  // on the watchdog's thread, where it must not block. One listener; empty: none.
  void listenToWaits(OnWaits on_waits);
  void tellWaits(const Operations& operations) const;

  // Called once, on the failing thread; at once if it has failed already (then returns 0).
  // unsubscribe() does not wait for a call that is under way: capture weak_ptrs.
  Subscription subscribe(OnFailed on_failed);
  void unsubscribe(Subscription id);

 private:
  const GenerationIdentity identity_;
  const Duration ask_after_;
  const std::shared_ptr<OperationRecorder> recorder_;
  const std::shared_ptr<SuccessCount> successes_;  // null: nobody asks
  std::atomic<State> state_{State::kForming};      // written under mutex_
  mutable Mutex mutex_;
  FailurePtr failure_ GUARDED_BY(mutex_);
  std::map<Subscription, OnFailed> subscribers_ GUARDED_BY(mutex_);
  Subscription next_ GUARDED_BY(mutex_) = 1;
  OnWaits on_waits_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
