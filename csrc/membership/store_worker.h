// The thread behind a StoreThread: one client, its own or a lent one, and a queue of requests
// ordered by when they are due.
//
// Owner: its StoreThread, and a process-wide list until it has ended. Threads: any; only run()
// touches the client. After stop or retirement post() refuses. Destruction waits for a thread that
// has left its loop, and abandons one that is in a call. Never throws once constructed.
//
// A retired worker's write that reaches the store late is undone by it, over the same client: where
// it stands in the place of what this process has written or found there since (late_writes.h).
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/threads.h"
#include "membership/late_writes.h"
#include "membership/store_thread.h"

namespace torchft_ext {

// What is asked of a store, and the answer. Shared by the caller and the worker, since either may
// be gone first.
struct StoreRequest {
  enum class Progress {
    kDone,       // the reply is complete
    kNextPart,   // more to do, at once and before later requests
    kLookAgain,  // not there yet: after a pause
  };
  // Runs on the worker; may throw. Idempotent: it is repeated if an old client turns out to be
  // broken.
  using Try = std::function<Progress(StoreClient&, StoreReply&)>;

  StoreRequest(Try attempt_, Deadline deadline_, std::string subject_, bool awaited_ = true)
      : attempt(std::move(attempt_)),
        deadline(deadline_),
        subject(std::move(subject_)),
        awaited(awaited_) {}
  // The same from its beginning, while the first is still in a call: whoever waits for the first
  // gets the answer that comes first.
  explicit StoreRequest(const std::shared_ptr<StoreRequest>& first)
      : attempt(first->attempt),
        deadline(first->deadline),
        subject(first->subject),
        awaited(first->awaited),
        instead_of(first) {}

  const Try attempt;  // as it begins: copied, never run
  const Deadline deadline;
  const std::string subject;  // for messages: which keys
  const bool awaited;         // false: nobody waits; still done when the worker stops
  const std::shared_ptr<StoreRequest> instead_of;  // null: of nobody
  std::atomic<bool> given_up{false};               // the caller is gone; written by the caller
  std::atomic<bool> made_again{false};  // by another worker: it has the last word; see retire()
  std::atomic<bool> looked{false};  // an attempt has ended with kLookAgain; written by the worker
  Duration pause = StoreThread::kFirstPause;  // before the next look; the worker's
  Try begun;                                  // how far it has come; the worker's
  std::shared_ptr<StoreClient> lent;  // kept for it since it was posted; constant from then on

  Mutex mutex;
  CondVar changed;
  bool done GUARDED_BY(mutex) = false;
  StoreReply reply GUARDED_BY(mutex);

  bool pointless() const {
    if (instead_of) return instead_of->pointless();
    return given_up.load(std::memory_order_acquire) || deadline.expired();
  }
  void noteLook();
  void finish(StoreReply answer);
};

class StoreWorker {
 public:
  using Requests = std::vector<std::shared_ptr<StoreRequest>>;

  // Of all workers of a store thread. stuck: counted down when the loop of a retired one ends after
  // all.
  struct Common {
    std::shared_ptr<std::atomic<int>> stuck;
    std::shared_ptr<LateWrites> late = std::make_shared<LateWrites>();
  };
  StoreWorker(const std::string& key, StoreFactory factory, const Common& common);
  // Has no thread: post() does what is due at once, on the caller's.
  static std::shared_ptr<StoreWorker> onCaller(const std::string& key, StoreFactory factory);
  ~StoreWorker();
  StoreWorker(const StoreWorker&) = delete;
  StoreWorker& operator=(const StoreWorker&) = delete;

  // Nothing where it has a lent client already, that is not gone. Empty: nothing.
  void lend(const LentClient& lent);
  enum class Posted { kYes, kRetired, kStopped };
  Posted post(const std::shared_ptr<StoreRequest>& request, Duration after = Duration::zero());
  // In one call for longer than kStuckAfter, and somebody gave up on it; in a call of a lent client
  // for longer than the lender's patience, or than one of these.
  bool stuck(bool caller_gave_up, const std::vector<StoreLimit::Patience>& others);
  // Gives the thread up; returns the requests that it has not begun, and the one that hangs in a
  // lent client, if it is still wanted, to be made again.
  Requests retire();
  // Refuses what is awaited, finishes the rest, ends. Does not wait. Idempotent; the thread ends
  // when what was posted for later has been done, or at once if that is dropped.
  enum class NotDue { kFinished, kDropped };
  void requestStop(NotDue not_due = NotDue::kFinished);
  bool join(Deadline deadline);
  void abandon(const std::string& why);
  bool stopping();
  bool finished() const;  // the loop has been left
  bool inForkedChild() const;

 private:
  struct Shared;
  explicit StoreWorker(std::shared_ptr<Shared> shared);  // without a thread

  const std::shared_ptr<Shared> shared_;  // also held by the thread, which may outlive this object
  const bool on_caller_ = false;
  OwnedThread thread_;
  std::atomic<bool> abandoned_{false};  // written by abandon()
};

}  // namespace torchft_ext
