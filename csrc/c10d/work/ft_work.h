// One operation, or several that belong together, as c10d's callers see it.
//
// Owner: the caller (and torch's future callbacks through what they captured, never through this
// object). Threads: any. After a failure of the generation: completed with it. Destruction without
// wait() is safe: the engine keeps the tensors. Only wait() and check() block, without the GIL as
// their callers have it; they end by the operation's deadline plus a second at the latest. In a
// callback they return in its turn, when those before it are through: for as long as user code
// takes (comm/callback_pool.h).
//
// Under torch's allow_inflight_collective_as_graph_input (compiled code) torch keeps every Work in
// a registry of the issuing thread, by its tensors. wait(), synchronize() and check() take it out,
// before they do anything else; completion does not, since wait_tensor() still owes the failure.
//
// On device tensors that an engine for them serves: wait() makes the current stream wait, and
// blocks its caller only for a barrier, an explicit timeout or Options(blocking_wait=True). It
// raises what is known by then; check() what becomes of the operation. The future is completed at
// once, in stream order. A staged operation (Options.staged) counts as one on host memory here: its
// results are in the tensors once it is complete.
#pragma once

#include <torch/headeronly/version.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/mutex.h"
#include "c10d/adapter/prepared.h"
#include "c10d/group/fork_guard.h"
#include "c10d/work/device_completion.h"
#include "c10d/work/work_key.h"
#include "comm/op_state.h"

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
#define TORCHFT_EXT_WORK_HAS_TIMEOUT
#endif

namespace torchft_ext {

class FtWork : public c10d::Work {
 public:
  using States = std::vector<std::shared_ptr<OpState>>;
  using Outputs = std::vector<std::vector<at::Tensor>>;

  // states: at least one. device: of operations on device tensors.
  FtWork(Described described, States states, std::optional<DeviceCompletion> device);
  // Blocks until the operation on host memory is complete, and raises nothing but what the wait
  // hook throws: wait() says what became of it.
  void complete();

  bool isCompleted() override;
  bool isSuccess() const override;  // false only once it has failed, as torch's own
  std::exception_ptr exception() const override;
  int sourceRank() const override;  // of a receive into host memory
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // kNoTimeout: until the operation's own deadline, at which its generation fails. An explicit
  // timeout, one for all operations of the Work, fails the generation when it runs out, in the name
  // of the first that is not complete. Raises the failure; an exception from the wait hook (a
  // signal) ends the generation first.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  // Blocks until the operation is complete, on the device too, then raises its failure.
  void check();
  void abort() override;
  // A list of tensors (of lists of tensors where there are several), or the failure. Complete when
  // wait() returns or raises, unless a callback computes meanwhile. On host memory its callbacks
  // run on callback threads; those that Python adds, on those alone (python/callback_future.h).
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // In milliseconds: on a device what it took there, with timing turned on; on the host the time
  // from its issue to its completion. RuntimeError where it is not known.
  float getDuration() const override;
  // A WorkResult; never an error.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  // Its place among the operations of the generation, from 1; 0: issued in a callback, outside of
  // the order. Of several that belong together, the first's.
  uint64_t getSequencenumber() const override;
#ifdef TORCHFT_EXT_WORK_HAS_TIMEOUT
  std::chrono::milliseconds getTimeout() const override;  // its limit, from issue
#endif
  void blockCurrentStream() override;
  uint64_t key() const {  // see work_key.h
    return key_;
  }
#ifdef TORCHFT_EXT_WORK_HAS_KEY
  uint64_t getCompletionKey() const override {
    return key_;
  }
#endif

  // What callbacks of its future need to know of it.
  struct Source {
    std::optional<CallbackPath> path;  // nullopt: what they issue has no name
    std::shared_ptr<Lifecycle> lifecycle;
    std::shared_ptr<std::atomic<uint64_t>> callbacks;  // how many its future has been given
  };
  std::optional<Source> source() const;  // nullopt: on device memory, where callbacks run at once

 private:
  struct Ending;
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
  struct Promise {
    FuturePtr future;
    std::shared_ptr<Ending> ending;  // completes it; null: of a device, complete from the start
  };

  void leaveRegistry();
  FailurePtr failure() const;  // the first failed state's
  void finishAll(std::chrono::milliseconds timeout) const;
  // given: when an explicit timeout runs out, for all states alike.
  void finish(OpState& state, std::chrono::milliseconds timeout, Deadline given) const;
  void giveUp(OpState& state, std::chrono::milliseconds timeout, Deadline ran_out) const;
  bool waitFor(OpState& state, Deadline deadline) const;
  void failGeneration(FailureKind kind, const std::string& how) const;
  Promise promiseOnce(Promise FtWork::*slot, const std::function<Promise()>& make, bool* made);
  FuturePtr promised(Promise FtWork::*slot, const std::function<Promise()>& make);
  void awaitFutures() const;
  FuturePtr deviceFuture();

  const ForkGuard guard_;
  const uint64_t key_ = nextWorkKey();
  const bool may_be_registered_;  // torch registers Works just after they are issued
  const States states_;
  const Outputs outputs_;
  const std::optional<DeviceCompletion> device_;
  const std::shared_ptr<Ending> end_of_profile_;  // null: nobody profiles
  const std::shared_ptr<std::atomic<uint64_t>> callbacks_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  mutable Mutex futures_mutex_;
  Promise future_;  // both under futures_mutex_, made by promiseOnce() alone
  Promise result_future_;
};

}  // namespace torchft_ext
