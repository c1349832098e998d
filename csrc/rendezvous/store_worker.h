// The thread behind a StoreThread: one client, and a queue of requests ordered by when they are
// due.
//
// Owner: its StoreThread, and a process-wide list until it has ended. Threads: any; only run()
// touches the client. After stop or retirement post() refuses. Destruction waits for a thread that
// has left its loop, and abandons one that is in a call. Never throws once constructed.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/threads.h"
#include "rendezvous/store_thread.h"

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
  using Attempt = std::function<Progress(StoreClient&, StoreReply&)>;

  StoreRequest(Attempt attempt_, Deadline deadline_, std::string subject_, bool awaited_ = true)
      : attempt(std::move(attempt_)),
        deadline(deadline_),
        subject(std::move(subject_)),
        awaited(awaited_) {}

  const Attempt attempt;
  const Deadline deadline;
  const std::string subject;          // for messages: which keys
  const bool awaited;                 // false: nobody waits; still done when the worker stops
  std::atomic<bool> given_up{false};  // the caller is gone; written by the caller
  std::atomic<bool> looked{false};    // an attempt has ended with kLookAgain; written by the worker
  Duration pause = StoreThread::kFirstPause;  // before the next look; the worker's

  Mutex mutex;
  CondVar changed;
  bool done GUARDED_BY(mutex) = false;
  StoreReply reply GUARDED_BY(mutex);

  bool pointless() const { return given_up.load(std::memory_order_acquire) || deadline.expired(); }
  void finish(StoreReply answer);
};

class StoreWorker {
 public:
  using Requests = std::vector<std::shared_ptr<StoreRequest>>;

  // stuck: counted down when the loop of a retired worker ends after all.
  StoreWorker(const std::string& key, StoreFactory factory,
              std::shared_ptr<std::atomic<int>> stuck);
  ~StoreWorker();
  StoreWorker(const StoreWorker&) = delete;
  StoreWorker& operator=(const StoreWorker&) = delete;

  enum class Posted { kYes, kRetired, kStopped };
  Posted post(const std::shared_ptr<StoreRequest>& request, Duration after = Duration::zero());
  // In one call for longer than kStuckAfter, and somebody gave up on it.
  bool stuck(bool caller_gave_up);
  // Gives the thread up; returns the requests that it has not begun.
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
  const std::shared_ptr<Shared> shared_;  // also held by the thread, which may outlive this object
  OwnedThread thread_;
  std::atomic<bool> abandoned_{false};  // written by abandon()
};

}  // namespace torchft_ext
