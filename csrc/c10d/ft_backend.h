// The c10d backend "ft": tensors in, operations of a Group out. Arguments are checked completely
// before anything is sent. Host and device tensors take the same way; what a device adds (streams,
// events, NCCL's types) is put to an operation just before it is issued.
//
// Owner: the ProcessGroup, and Python handles. Threads: any. After a failure of the epoch every
// operation returns a Work that has already failed; only bad arguments raise. Destruction fails the
// epoch and does not wait; in a forked child it touches nothing. Rank and size follow the epoch. It
// never takes the GIL.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <type_traits>
#include <vector>

#include "c10d/abort_hooks.h"
#include "c10d/arguments.h"
#include "c10d/bucket_layouts.h"
#include "c10d/coalescing.h"
#include "c10d/completion_hook.h"
#include "c10d/engines.h"
#include "c10d/ephemeral_timeouts.h"
#include "c10d/ft_work.h"
#include "c10d/options.h"
#include "c10d/prepared.h"
#include "c10d/process.h"
#include "c10d/store_adapter.h"
#include "comm/group.h"
#include "nccl/memory_registry.h"

namespace torchft_ext {

class FtBackend : public c10d::Backend {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  struct Creation {
    c10::intrusive_ptr<c10d::Store> store;
    int rank = 0;
    int size = 1;
    std::string engine = "host";
    std::optional<c10::Device> bound_device;  // init_process_group(device_id=)
    std::string group_name;
    c10::intrusive_ptr<FtOptions> options;
    Milliseconds timeout{0};  // of init_process_group(); Options' own goes before it
    bool may_resize = true;   // false: the ProcessGroup above reports a fixed rank and size
    // Made beside another group (new_group): that one, and the members' ranks in it.
    c10::intrusive_ptr<FtBackend> beside;
    std::vector<int> ranks_beside;
    bool begin = true;  // false: the first epoch comes with configure() or reconfigure()
  };
  // Makes the backend and its first epoch over the creator's store. Blocks up to the timeout.
  // Raises what configure() raises, and what makeEngine() raises; the others are told either way.
  static c10::intrusive_ptr<FtBackend> create(const Creation& creation);

  FtBackend(const Creation& creation, EngineChoice choice);
  ~FtBackend() override;

  // Begins an epoch over the store at "host:port/prefix". ValueError for bad arguments,
  // RuntimeError for a group that is shut down or configuring already or cannot be resized; else
  // the failure, and the group is failed with it.
  void configure(const std::string& store_address, int rank, int size,
                 std::optional<Milliseconds> timeout);
  void abort(const std::string& why);
  // Blocks until everything issued on device tensors is complete, then raises the epoch's failure.
  // Running out of time (nullopt: the group's timeout) fails the epoch.
  void check(std::optional<Milliseconds> timeout);
  FailurePtr errored() const;
  int64_t epoch() const;
  // Before the first epoch: what the creator was told. getRank() is fixed at construction before
  // torch 2.14.
  int currentRank() const;
  int currentSize() const;
  // The processes of the last epoch that was active, or of the one before it, by rank there.
  std::vector<Incarnation> incarnations(bool before) const;
  GroupStats stats() const;
  const Engine& engine() const { return *engine_; }
  // Of DDP's buckets that are reduced in this group.
  BucketLayouts& bucketLayouts() { return bucket_layouts_; }
  // Blocks until all members of that epoch have called it, up to the group's timeout. Raises the
  // epoch's failure: a mismatch where one called it for another layout.
  void compareLayouts(BucketTag tag);
  const std::string& groupName() const;

  const std::string getBackendName() const override { return "ft"; }
  // A copy: another thread may set the timeout meanwhile.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return optionsNow(); }
  void setTimeout(Milliseconds timeout) override;
#ifdef C10D_BACKEND_HAS_RECONFIGURE                                // torch 2.14 has it too
  void addEphemeralTimeout(const Milliseconds& timeout) override;  // see ephemeral_timeouts.h
#endif
  void abort() override {
    abort("abort() was called");
  }
  void shutdown() override;
  c10d::ErrorType getError() override;
  void enableCollectivesTiming() override {
    timed_.store(true, std::memory_order_relaxed);
  }
  // See completion_hook.h; turns timing on. RuntimeError for a second one. Before operations are
  // issued: torch's hasHooks() looks without a lock.
  void registerOnCompletionHook(CompletionHook::Hook&& hook) override;
  // Blocks until operations issued since a hook was registered are over and the hook has returned
  // from each; CommTimeoutError where that takes longer than the group's timeout, which leaves the
  // epoch as it is. RuntimeError from within a hook.
  void waitForPendingWorks() override;
  void setSequenceNumberForGroup() override {}
  // Collectives issued in this epoch.
  uint64_t getSequenceNumberForGroup() override {
    return sequence_.load(std::memory_order_relaxed);
  }

  bool supportsSplitting() const override {
    return true;
  }
  bool supportsShrinking() const override {
    return true;
  }
  // A group of the members with these ranks of the current epoch, in ascending order; null for who
  // is not among them, and need not call it. Its first epoch meets below the current one's place in
  // the store. options: null, or the parent's: copied. Blocks up to their timeout; abort() of this
  // group ends it. Raises as configure() does, the failure of an epoch that is over, and
  // RuntimeError where there is none. What failed may be tried again.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  // The same with a group that may be resized: where its ProcessGroup follows the epoch.
  c10::intrusive_ptr<FtBackend> splitOff(const c10::intrusive_ptr<c10d::Store>& store,
                                         const std::vector<int>& ranks,
                                         const c10::intrusive_ptr<c10d::Backend::Options>& options,
                                         bool may_resize);
  // A copy of this group's own, with the timeout as it is now.
  c10::intrusive_ptr<FtOptions> optionsNow() const;
  // A copy of them, or of this group's own.
  c10::intrusive_ptr<FtOptions> optionsOfChild(
      const c10::intrusive_ptr<c10d::Backend::Options>& given) const;
  // A group of all members but these, in the same order; those left all call it, with the same
  // ranks. The epoch may have failed. SHRINK_ABORT (1) aborts it first; else it is left as it is.
  // Blocks and raises as split(). What failed may be tried again, with more ranks too.
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;

  // Registers a pool's device memory with NCCL, in this epoch and all to come
  // (ft_backend_memory.cpp has what they raise). Block up to the group's timeout. The second waits
  // for everything issued, as check() does, and fails the epoch where that, or NCCL, takes longer.
  void registerMemPool(MemoryPool pool);
  void deregisterMemPool(const PoolId& id);

  // Operations that this thread issues in between begin as one, with one Work. On the CPU they
  // begin one after the other.
  bool supportsCoalescing() const override {
    return devices_.platform() != nullptr;
  }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;  // null: there was none

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  // What DDP calls where it knows the indices beforehand: allreduce() finds them itself.
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  // See monitored_barrier.h. Raises the failure, and ValueError for a negative limit.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

#ifdef C10D_BACKEND_HAS_RECONFIGURE  // torch 2.14 has it too
  // A gather into one tensor: [world size * n] on the root, where a stack of them does as well.
  // Elsewhere the output is not looked at. gather_into_tensor() forwards to it.
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input,
                        const c10d::GatherOptions& options) override;
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
  // See abort_hooks.h. ValueError for an id that is taken, or of none.
  void registerAbortHook(int64_t hook_id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t hook_id) override;
#endif

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // As configure(), with members named by their handles, over the TCPStore of the first one's
  // creator: it has to stay until the epoch stands. A vector gives the ranks, a set is put in
  // alphabetical order, so the store of the smallest handle serves it. Blocks up to the timeout;
  // the Work has completed. Raises as configure() does, ValueError for a store that this host
  // cannot reach, and RuntimeError for a uuid that has begun an epoch here before. An attempt that
  // failed may be repeated with its uuid. Hints are ignored.
  WorkPtr reconfigure(const c10d::ReconfigureOptions& options) override;
  // ValueError where the creator's store is no TCPStore: it has no address.
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  bool supportsReconfigure() const override;
#endif

 private:
  static constexpr bool kTorchFollowsBackend = !std::is_const_v<decltype(rank_)>;

  // One consistent look at the epoch: what buffers are laid out for. The group refuses an operation
  // whose epoch is over.
  struct Place {
    int64_t epoch = 0;
    int rank = 0;
    int size = 1;
  };

  // Where the members of an epoch have met.
  struct EpochPlace {
    std::shared_ptr<StoreThread> thread;
    std::string prefix;
    int64_t epoch = 0;  // 0: none
  };

  Place enter() const;
  EpochPlace placeOf(int64_t epoch, const char* operation);
  c10::intrusive_ptr<FtBackend> derive(Creation creation, const Place& place,
                                       const std::vector<int>& members, const EpochPlace& where);
  c10::intrusive_ptr<FtBackend> childAt(const EpochPlace& where, const Creation& creation,
                                        const std::vector<int>& members);
  std::vector<c10::intrusive_ptr<FtBackend>> childrenToCome();
  void awaitAll(Deadline deadline);
  void checkPools(const char* operation) const;
  void throwUnlessDone(const char* operation, const MemoryOutcome& outcome, Clock::time_point began,
                       Duration limit) const;
  size_t awaitHook(Deadline deadline);  // see CompletionHook::awaitAll(); a signal aborts the epoch
  static void markAs(Prepared& prepared, const BucketTag& tag);
  Prepared prepare(const Place& place, OpKind kind, Milliseconds timeout, bool async) const;
  void setReduction(Prepared& prepared, const Argument& argument, const at::Tensor& tensor,
                    const c10d::ReduceOp& reduce_op) const;
  WorkPtr submit(Prepared prepared, Described described);
  WorkPtr submitAll(std::vector<Prepared> prepared, Described described);
  // Where they run has been checked.
  WorkPtr issueAll(std::vector<Prepared> prepared, Described described, const c10::Device& device);
  WorkPtr issueBlock(Coalescing::Collected& collected);
  static void checkInOnePlace(const std::vector<Prepared>& prepared, const c10::Device& device);
  void placeOn(const c10::Device& device, Prepared& prepared) const;
  void checkForNan(const Prepared& prepared);  // host memory
  std::function<std::string()> verdictOn(const Prepared& prepared, const c10::Stream& stream) const;
  std::function<void(const c10::Stream&)> behind(const c10::Device& device,
                                                 const Prepared& prepared,
                                                 const at::Tensor& poison_flag) const;
  void begin(const std::shared_ptr<StoreThread>& store, const std::string& prefix, int rank,
             int size, std::optional<Milliseconds> timeout);
  void noteFormed(EpochPlace place);
  void followEpoch();
  void keep(std::shared_ptr<StoreThread> store);

  Prepared prepareAllreduce(const Argument& argument, const at::Tensor& tensor,
                            const c10d::AllreduceOptions& options) const;
  Prepared prepareSparseAllreduce(const Argument& argument, const at::Tensor& tensor,
                                  const c10d::AllreduceOptions& options) const;
  Prepared prepareAllgather(const Argument& outs, const Tensors& outputs, const Argument& in,
                            const at::Tensor& input, const c10d::AllgatherOptions& options) const;
  Prepared prepareAllgatherInto(const Argument& out, const at::Tensor& output, const Argument& in,
                                const at::Tensor& input,
                                const c10d::AllgatherOptions& options) const;
  Prepared prepareReduceScatterFrom(const Argument& out, const at::Tensor& output,
                                    const Argument& in, const at::Tensor& input,
                                    const c10d::ReduceScatterOptions& options) const;
  static std::shared_ptr<void> ownersOf(Prepared& prepared);
  void noteUse(const c10::Device& device) const;
  std::optional<c10::Device> deviceUsed() const;  // by operations so far; none, or several: nullopt
  WorkPtr receive(Tensors& tensors, std::optional<int> source, int tag);

  const ForkGuard guard_;
  const c10::intrusive_ptr<FtOptions> options_;  // its timeout is the first one
  std::atomic<Milliseconds::rep> timeout_ms_;    // as set last, by any thread
  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<PoisonEngine> poison_;  // null: Options.poison is off
  const Devices devices_;
  const std::shared_ptr<MemoryRegistry> memory_;  // null: no NCCL
  const std::string engine_name_;
  const std::optional<c10::Device> bound_device_;
  BucketLayouts bucket_layouts_;
  static constexpr int kNoDevice = -1;
  static constexpr int kSeveralDevices = -2;
  mutable std::atomic<int> device_used_{kNoDevice};  // written by whoever issues
  const bool nan_check_;
  const bool may_resize_;
  const int fixed_rank_;  // what a ProcessGroup that cannot follow reports
  const int fixed_size_;
  std::atomic<int> last_rank_{fixed_rank_};  // of the last epoch, for forked children
  std::atomic<int> last_size_{fixed_size_};
  c10::intrusive_ptr<c10d::Store> creators_store_;  // constant; let go of in a forked child
  const uint64_t serial_;                           // of this object within the process
  Mutex store_mutex_;
  // Of the last epoch: kept, since making a client may take seconds.
  std::shared_ptr<StoreThread> store_ GUARDED_BY(store_mutex_);
  EpochPlace formed_ GUARDED_BY(store_mutex_);  // of the last configure(), where it succeeded
  // Split or shrunken off this epoch: those being formed, and those tried in vain; by place.
  std::map<std::string, c10::intrusive_ptr<FtBackend>> to_come_ GUARDED_BY(store_mutex_);
  // Of every reconfigure() that succeeded.
  std::set<int64_t> used_uuids_ GUARDED_BY(store_mutex_);
  const std::shared_ptr<AbortHooks> abort_hooks_ = std::make_shared<AbortHooks>();
  std::shared_ptr<Group> group_;       // constant; let go of in a forked child
  std::atomic<uint64_t> sequence_{0};  // any thread
  std::atomic<bool> timed_{false};     // by enableCollectivesTiming()
  const std::shared_ptr<CompletionHook> hook_ = std::make_shared<CompletionHook>();
  Coalescing coalescing_;
  mutable EphemeralTimeouts extra_time_;
};

}  // namespace torchft_ext
