// The c10d backend "ft": a Group as torch knows it. Each operation goes through three hands: the
// TensorAdapter makes it of tensors, the OperationIssuer issues it, the FtWork is what its caller
// gets. Groups are made in group_making.h and derived_groups.h.
//
// Owner: the ProcessGroup, and Python handles. Threads: any. After a failure of the generation
// every operation returns a Work that has already failed; only bad arguments raise. Destruction
// fails the generation and does not wait; in a forked child it touches nothing. Rank and size
// follow the generation. It never takes the GIL.
#pragma once

#include <torch/headeronly/version.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "c10d/adapter/memory_pools.h"
#include "c10d/adapter/tensor_adapter.h"
#include "c10d/group/abort_hooks.h"
#include "c10d/group/derived_groups.h"
#include "c10d/group/engines.h"
#include "c10d/group/fork_guard.h"
#include "c10d/group/group_spec.h"
#include "c10d/group/options.h"
#include "c10d/work/completion_hook.h"
#include "c10d/work/operation_issuer.h"
#include "comm/failure_listener.h"
#include "comm/group.h"
#include "host/process.h"

namespace torchft_ext {

class Poison;

class FtBackend : public c10d::Backend {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  // Without a generation. makeBackend() is what makes a group's.
  FtBackend(const GroupSpec& spec, EngineChoice choice);
  ~FtBackend() override;

  // Begins a generation that meets there. timeout: nullopt for the group's. Raises the failure,
  // with which the group is failed then, and RuntimeError as configure().
  void form(MeetingPlace where, int rank, int size, std::optional<Milliseconds> timeout);
  // The same, but returns the failure; null: the generation stands.
  FailurePtr tryForm(MeetingPlace where, int rank, int size, std::optional<Milliseconds> timeout);
  // From the next generation on: interface, ports and heartbeat of these options, where the group
  // itself has chosen none. RuntimeError where no port can be had. Before the group is split.
  void followNetwork(const FtOptions& options);
  // Before a generation: only members of that group's generation with these ranks may be in it.
  void expectMembersOf(const FtBackend& other, const std::vector<int>& ranks);
  // Begins a generation over the store at "host:port/prefix". ValueError for bad arguments,
  // RuntimeError for a group that is shut down or configuring already or cannot be resized; else
  // the failure, and the group is failed with it.
  void configure(const std::string& store_address, int rank, int size,
                 std::optional<Milliseconds> timeout);
  void abort(const std::string& why);
  // Blocks until everything issued on device tensors is complete, then raises the generation's
  // failure. Running out of time (nullopt: the group's timeout) fails the generation.
  void check(std::optional<Milliseconds> timeout);
  FailurePtr errored() const;
  int64_t generation() const;
  // Before the first generation: what the creator was told. getRank() is fixed at construction
  // before torch 2.14.
  int currentRank() const;
  int currentSize() const;
  // The processes of the last generation that was active, or of the one before it, by rank there.
  std::vector<Incarnation> incarnations(bool before) const;
  GroupStats stats() const;
  std::shared_ptr<Engine> engine() const { return group_->engine(); }
  Group& group() { return *group_; }
  const Devices& devices() const { return issuer_.devices(); }
  // Called once for each generation that fails, on a callback thread. Empty: no more.
  void onFailure(FailureListener::Callback callback) { listener_->set(std::move(callback)); }
  // Of DDP's buckets that are reduced in this group.
  BucketLayouts& bucketLayouts() { return issuer_.bucketLayouts(); }
  // Blocks until all members of that generation have called it, up to the group's timeout. Raises
  // the generation's failure: a mismatch where one called it for another layout.
  void compareLayouts(BucketTag tag);
  const std::string& groupName() const;

  const std::string getBackendName() const override {
    return own_name_ ? std::string("ft") : backend_name_;
  }
  // Whether it says so even where it stands in another backend's place.
  void sayOwnName(bool own) { own_name_ = own; }
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
  // After shutdown(): configure() may follow after all. Memory pools are not registered any more.
  void reopen();
  c10d::ErrorType getError() override;
  void enableCollectivesTiming() override {
    issuer_.enableTiming();
  }
  // See completion_hook.h; turns timing on. RuntimeError for a second one. Before operations are
  // issued: torch's hasHooks() looks without a lock.
  void registerOnCompletionHook(CompletionHook::Hook&& hook) override;
  // Blocks until operations issued since a hook was registered are over and the hook has returned
  // from each; CommTimeoutError where that takes longer than the group's timeout, which leaves the
  // generation as it is. RuntimeError from within a hook.
  void waitForPendingWorks() override;
  void setSequenceNumberForGroup() override {}
  // Collectives issued in this generation.
  uint64_t getSequenceNumberForGroup() override {
    return issuer_.issued();
  }

  bool supportsSplitting() const override {
    return true;
  }
  bool supportsShrinking() const override {
    return true;
  }
  // A group of the members with these ranks of the current generation, in this order, the same on
  // all (torch sorted them before 2.14); null for who is not among them, and need not call it. Its
  // first generation meets below the current one's place in the store. options: null, or the
  // parent's: copied. Blocks up to their timeout; abort() of this group ends it. Raises as
  // configure() does, the failure of a generation that is over, and RuntimeError where there is
  // none. What failed may be tried again.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  // The same with a group that may be resized: where its ProcessGroup follows the generation.
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
  // ranks. The generation may have failed. SHRINK_ABORT (1) aborts it first; else it is left as it
  // is. Blocks and raises as split(). What failed may be tried again, with more ranks too.
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;

  // See memory_pools.h.
  void registerMemPool(MemoryPool pool);
  void deregisterMemPool(const PoolId& id);

  // Operations that this thread issues in between begin as one, with one Work. On the CPU they
  // begin one after the other.
  bool supportsCoalescing() const override {
    return devices().platform() != nullptr;
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

#ifdef C10D_BACKEND_HAS_HOOKS  // torch 2.14 has it too
  // See abort_hooks.h. ValueError for an id that is taken, or of none.
  void registerAbortHook(int64_t hook_id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t hook_id) override;
#endif

#ifdef TORCHFT_EXT_WORK_HAS_KEY  // torch 2.15
  // torch's recorder and health check ask before they register.
  bool supportsAbortHooks() const override {
    return true;
  }
  bool supportsCompletionHooks() const override {
    return true;
  }
  // See success_hooks.h. ValueError for an id that is taken, or of none.
  void registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t hook_id) override;
#endif

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // As configure(), with members named by their handles, over the TCPStore of the first one's
  // creator: it has to stay until the generation stands. A vector gives the ranks, a set is put in
  // alphabetical order, so the store of the smallest handle serves it. Blocks up to the timeout;
  // the Work has completed. Raises as configure() does, ValueError for a store that this host
  // cannot reach, and RuntimeError for a uuid that has begun a generation here before. An attempt
  // that failed may be repeated with its uuid. Hints are ignored.
  WorkPtr reconfigure(const c10d::ReconfigureOptions& options) override;
  // ValueError where the creator's store is no TCPStore: it has no address.
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  bool supportsReconfigure() const override;
#endif

 private:
  static constexpr bool kTorchFollowsBackend = !std::is_const_v<decltype(rank_)>;

  RankInGeneration enter() const;
  TensorAdapter adapter() const {
    return {enter(), devices().platform().get()};  // what is staged is reduced on the CPU
  }
  WorkPtr submit(PreparedCall call, bool asynchronous = true);
  static WorkPtr completed(WorkPtr work);
  GroupSpec specOfChild(const c10::intrusive_ptr<c10d::Store>& store,
                        const c10::intrusive_ptr<c10d::Backend::Options>& options) const;
  void followGeneration();
  // see CompletionHook::awaitAll(); a signal aborts the generation
  size_t awaitHook(Deadline deadline);

  const ForkGuard guard_;
  const c10::intrusive_ptr<FtOptions> options_;  // its timeout is the first one
  std::atomic<Milliseconds::rep> timeout_ms_;    // as set last, by any thread
  const std::shared_ptr<Poison> poison_;  // null: no device is served, or Options.poison is off
  const std::string engine_name_;
  const std::optional<c10::Device> bound_device_;
  const bool may_resize_;
  const int fixed_rank_;  // what a ProcessGroup that cannot follow reports
  const int fixed_size_;
  std::atomic<int> last_rank_{fixed_rank_};  // of the last generation, for forked children
  std::atomic<int> last_size_{fixed_size_};
  c10::intrusive_ptr<c10d::Store> creators_store_;  // constant; let go of in a forked child
  const std::string backend_name_;                  // as torch's programs know it
  std::atomic<bool> own_name_{false};
  const uint64_t serial_;  // of this object within the process
  Mutex store_mutex_;
  // Of the last generation: kept, since making a client may take seconds. None after shutdown().
  std::shared_ptr<StoreThread> store_ GUARDED_BY(store_mutex_);
  // Of every reconfigure() that succeeded.
  std::set<int64_t> used_uuids_ GUARDED_BY(store_mutex_);
  const std::shared_ptr<AbortHooks> abort_hooks_ = std::make_shared<AbortHooks>();
  const std::shared_ptr<FailureListener> listener_ = std::make_shared<FailureListener>();
  std::shared_ptr<Group> group_;  // constant; let go of in a forked child
  const std::shared_ptr<CompletionHook> hook_ = std::make_shared<CompletionHook>();
  const std::shared_ptr<SuccessHooks> success_hooks_ = std::make_shared<SuccessHooks>();
  OperationIssuer issuer_;
  MemoryPools memory_;
  DerivedGroups derived_{*this};
};

}  // namespace torchft_ext
