// One simulated communicator: its state between calls, and what runs on streams for it.
//
// Owner: the table in sim_nccl.cpp until it is aborted or destroyed; tasks on streams share it.
// Threads: methods from one calling thread at a time (CallScope records it where that is broken),
// run() on stream threads. Only awaitIdle() blocks.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "nccl/nccl_types.h"
#include "sim_exchange.h"
#include "sim_stream.h"

namespace torchft_ext::sim {

enum class CallKind { kAllreduce, kBroadcast, kReduce, kAllgather, kReduceScatter, kSend, kRecv };
const char* toString(CallKind kind);

// A reduction that multiplies first: by a number, or by what lies there when it runs.
struct PreMul {
  double factor = 1;
  const void* on_device = nullptr;
  NcclType type = NcclType::kFloat32;
};

struct NcclCall {
  CallKind kind = CallKind::kAllreduce;
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;
  NcclType type = NcclType::kInt8;
  NcclRedOp op = kNcclSum;
  int peer = 0;  // or root
  SimStream* stream = nullptr;
  std::optional<PreMul> multiplied{};  // of `op`, as it was when the call was made
};

class SimCommunicator : public std::enable_shared_from_this<SimCommunicator> {
 public:
  SimCommunicator(int rank, int size, bool blocking = false)
      : blocking_(blocking), rank_(rank), size_(size) {}

  bool blocking() const { return blocking_; }

  int rank() const { return rank_; }
  int size() const { return size_; }

  // ---- beginning
  NcclResult join(const std::vector<NcclUniqueId>& ids);

  // ---- state
  // One asyncError(): what is in progress gets on.
  NcclResult poll();
  bool inProgress() const;
  bool failed() const;  // asynchronous error, or revoked
  bool revoked() const;
  bool running() const;  // operations that have not ended, enqueued or to be
  void revoke();
  void beginFinalize();
  void raiseStop() { stop_ = true; }
  // Until the operations enqueued so far have ended, and no graph holds this. As the real one,
  // which forgets graphs once it was revoked; a graph that ends after that is a violation.
  void awaitIdle();
  // Of a blocking one: until it is no longer in progress, or is stopped, which is an error.
  NcclResult awaitThrough();

  // ---- operations
  // Enqueued at once, or when it is no longer in progress: then kInProgress.
  NcclResult launch(std::vector<NcclCall> calls);
  // The next `polls` polls say kInProgress; -1: all.
  void stayInProgress(int polls);
  NcclRedOp addPreMulSum(const PreMul& reduction);
  std::optional<PreMul> preMulSum(NcclRedOp op) const;
  bool dropPreMulSum(NcclRedOp op);

  std::atomic<int> inside{0};         // of a blocking one: groups that have calls on it
  std::atomic<std::thread::id> by{};  // the thread of the last of them
  std::atomic<int> callers{0};        // threads inside a call; more than one is a violation
  std::atomic<bool> aborting{false};  // by abort(): nothing may be called any more
  bool capturedByGraph() const;
  bool freed() const;

 private:
  void stayInProgressLocked(int polls) REQUIRES(mutex_);
  void dropDeferred() REQUIRES(mutex_);
  void becomeReady() REQUIRES(mutex_);
  void enqueueLocked(std::vector<NcclCall> calls) REQUIRES(mutex_);
  std::shared_ptr<Exchange> exchange() const;
  void awaitTurn(uint64_t launch) const;
  void run(const std::vector<NcclCall>& calls);
  bool strike(const NcclCall& call);
  void hangUntilStopped();
  bool runMessages(const std::vector<NcclCall>& calls);
  bool runCollective(const NcclCall& asked);
  bool allreduce(const NcclCall& call);
  bool broadcast(const NcclCall& call);
  bool reduce(const NcclCall& call);
  bool allgather(const NcclCall& call);
  bool reduceScatter(const NcclCall& call);
  Transfer part(const NcclCall& call, bool sending, int peer, const void* data, size_t bytes) const;
  // Of its input to every other rank, each `stride` bytes after the one for the rank before.
  std::vector<Transfer> toOthers(const NcclCall& call, size_t stride) const;
  // Everyone's contributions, in rank order; nullopt: stopped.
  std::optional<std::vector<std::vector<char>>> gatherParts(const NcclCall& call,
                                                            std::vector<Transfer> sends,
                                                            const void* own);
  bool reduceParts(const NcclCall& call, std::vector<Transfer> sends, const void* own);

  const bool blocking_;
  const int rank_;
  const int size_;
  uint32_t sequence_ = 0;          // of collectives; run() only, hence one stream at a time
  std::atomic<uint64_t> turn_{0};  // by the task whose turn it was: launches that are done
  std::atomic<bool> stop_{false};  // by revoke() and abort(): operations end, unfinished

  mutable Mutex mutex_;
  CondVar idle_;
  std::shared_ptr<Exchange> exchange_ GUARDED_BY(mutex_);
  bool ready_ GUARDED_BY(mutex_) = false;
  Clock::time_point ready_not_before_ GUARDED_BY(mutex_){};
  bool never_ready_ GUARDED_BY(mutex_) = false;
  bool revoked_ GUARDED_BY(mutex_) = false;
  bool finalizing_ GUARDED_BY(mutex_) = false;
  NcclResult error_ GUARDED_BY(mutex_) = NcclResult::kSuccess;
  int polls_left_ GUARDED_BY(mutex_) = 0;
  std::vector<std::vector<NcclCall>> deferred_ GUARDED_BY(mutex_);
  int outstanding_ GUARDED_BY(mutex_) = 0;
  uint64_t launches_ GUARDED_BY(mutex_) = 0;
  int graphs_ GUARDED_BY(mutex_) = 0;
  bool captured_before_ GUARDED_BY(mutex_) = false;
  bool freed_ GUARDED_BY(mutex_) = false;
  std::map<NcclRedOp, PreMul> factors_ GUARDED_BY(mutex_);
  NcclRedOp next_op_ GUARDED_BY(mutex_) = kNcclAvg + 1;
};

}  // namespace torchft_ext::sim
