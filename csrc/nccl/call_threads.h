// Calls into NCCL that may not return, each on a thread of its own: on a blocking communicator, its
// initialisation, its end, and what may have to connect to peers first. (The threads on which
// registered memory is given back have the same name, and an owner of their own: memory_removal.h.)
//
// Owner of the threads: this; the process's NCCL threads own it. A call whose caller has given it
// up goes on until NCCL returns, which the end of its communicator brings about; what it uses is
// its own. Threads: any. start() joins those that have returned; only await() and stop() block.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/fork.h"
#include "base/mutex.h"
#include "base/threads.h"
#include "nccl/nccl_types.h"

namespace torchft_ext {

class CallThreads {
 public:
  class Call {
   public:
    // Waits until it has returned. nullopt: not by the deadline.
    std::optional<NcclResult> await(Deadline deadline);

   private:
    friend class CallThreads;
    void finish(NcclResult result);
    Mutex mutex_;
    CondVar changed_;
    std::optional<NcclResult> result_ GUARDED_BY(mutex_);
  };

  ~CallThreads();  // leaves what has not returned to itself

  // Null: no thread could be started, or it was stopped. What the call throws becomes
  // kInternalError, in the log.
  std::shared_ptr<Call> start(std::function<NcclResult()> call);
  // False: one has not returned by the deadline and is left to itself. None starts afterwards.
  bool stop(Deadline deadline);

 private:
  bool inherited() const { return fork_count_ != forkCount(); }  // its threads are the parent's
  bool collect();

  const uint64_t fork_count_ = forkCount();
  Mutex mutex_;
  std::vector<OwnedThread> threads_ GUARDED_BY(mutex_);
  bool stopped_ GUARDED_BY(mutex_) = false;
};

}  // namespace torchft_ext
