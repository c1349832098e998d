#include "sim_nccl.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "sim_communicator.h"
#include "sim_device.h"
#include "sim_faults.h"
#include "sim_reduce.h"
#include "sim_registrations.h"

namespace torchft_ext::sim {
namespace {

using CommPtr = std::shared_ptr<SimCommunicator>;

// Handles are numbers that are never used twice, so that a stale one is known.
class Table {
 public:
  static Table& instance() {
    static auto* const table = new Table;
    return *table;
  }
  NcclComm add(CommPtr comm) {
    MutexLock lock(mutex_);
    comms_[++last_] = std::move(comm);
    return reinterpret_cast<NcclComm>(last_);
  }
  CommPtr find(NcclComm handle) const {
    MutexLock lock(mutex_);
    const auto found = comms_.find(reinterpret_cast<uintptr_t>(handle));
    return found == comms_.end() ? nullptr : found->second;
  }
  void remove(NcclComm handle) {
    Registrations::removeAll(handle);
    CommPtr last;
    MutexLock lock(mutex_);
    const auto found = comms_.find(reinterpret_cast<uintptr_t>(handle));
    if (found == comms_.end()) return;
    last = std::move(found->second);
    comms_.erase(found);
  }
  void clear() {
    std::map<uintptr_t, CommPtr> gone;
    MutexLock lock(mutex_);
    gone.swap(comms_);
  }
  NcclSnapshot snapshot() const {
    NcclSnapshot snapshot;
    MutexLock lock(mutex_);
    snapshot.communicators = static_cast<int>(comms_.size());
    for (const auto& [handle, comm] : comms_) snapshot.captured += comm->capturedByGraph() ? 1 : 0;
    return snapshot;
  }

 private:
  mutable Mutex mutex_;
  uintptr_t last_ GUARDED_BY(mutex_) = 0xC000;
  std::map<uintptr_t, CommPtr> comms_ GUARDED_BY(mutex_);
};

// A thread inside of a blocking communicator, where another one may abort it: from its first call
// in a group to the group's end.
class Inside {
 public:
  explicit Inside(CommPtr comm) : comm_(std::move(comm)) {
    comm_->by = std::this_thread::get_id();
    ++comm_->inside;
  }
  ~Inside() { --comm_->inside; }
  Inside(const Inside&) = delete;

 private:
  CommPtr comm_;
};

// One thread's group: what waits for the outermost groupEnd().
struct ThreadGroup {
  int depth = 0;
  std::vector<CommPtr> inits;                                       // of blocking ones
  std::vector<std::pair<CommPtr, std::vector<NcclCall>>> launches;  // in order of first use
  std::vector<std::pair<NcclComm, CommPtr>> aborts;
  std::vector<std::pair<NcclComm, CommPtr>> destroys;
  std::vector<std::unique_ptr<Inside>> inside;
};
thread_local ThreadGroup group;

enum Allowed : unsigned {
  kWhenInProgress = 1,
  kWhenRevoked = 2,
  kWhenFailed = 4,
  kFromAnother = 8,  // thread, while one is inside of a blocking communicator
};

// One call on a communicator. comm is null where it must not be made: the call is refused.
class CallScope {
 public:
  CallScope(NcclComm handle, const char* call, unsigned allowed) {
    comm = Table::instance().find(handle);
    // One that is blocking and not freed takes calls that were on their way when it was aborted.
    if (!comm || (comm->aborting && !comm->blocking())) {
      refuse(call, "was called on a communicator that is aborted, destroyed or none");
      return;
    }
    if (comm->blocking() && (allowed & kFromAnother) != 0) return;
    counted_ = comm;
    if (comm->callers++ > 0) violation(std::string(call) + ": two threads in one communicator");
    if (comm->inside > 0 && comm->by.load() != std::this_thread::get_id())
      refuse(call, "was called on a blocking communicator while another call is inside");
    else if (!comm->blocking() && comm->inProgress() && (allowed & kWhenInProgress) == 0)
      refuse(call, "was called on a communicator that is in progress");
    else if (comm->revoked() && (allowed & kWhenRevoked) == 0)
      refuse(call, "was called on a revoked communicator");
    else if (comm->failed() && !comm->revoked() && (allowed & kWhenFailed) == 0)
      refuse(call, "was called on a communicator with an asynchronous error");
  }
  ~CallScope() {
    if (counted_) --counted_->callers;
  }
  CallScope(const CallScope&) = delete;
  CommPtr comm;

 private:
  void refuse(const char* call, const char* why) {
    violation(std::string(call) + " " + why);
    comm = nullptr;
  }
  CommPtr counted_;
};

class SimNccl final : public NcclApi {
 public:
  int version() const override { return Faults::instance().version(); }

  bool has(NcclFeature feature) const override {
    static const std::map<NcclFeature, int> since = {
        {NcclFeature::kDeferredAbort, 22203}, {NcclFeature::kScalableInit, 22300},
        {NcclFeature::kFloat8, 22400},        {NcclFeature::kSafeAbort, 22602},
        {NcclFeature::kRevoke, 22807},
    };
    return version() >= since.at(feature);
  }

  std::string lastError(NcclComm /*comm*/) override { return "simulated NCCL error"; }

  NcclResult getUniqueId(NcclUniqueId* id) override {
    if (const auto failure = enter("unique_id", -1)) return *failure;
    Faults::instance().count("unique_ids");
    return Exchange::create(id) ? NcclResult::kSuccess : NcclResult::kSystemError;
  }
  void releaseRoot(const NcclUniqueId& id) override {
    if (const std::shared_ptr<Exchange> exchange = Exchange::open(id)) exchange->giveUp();
  }

  NcclResult init(NcclComm* comm, const NcclInit& init) override {
    *comm = nullptr;
    if (const auto failure = enter("init", init.rank)) return *failure;
    if (init.rank < 0 || init.rank >= init.size || init.size > kMaxRanks || init.ids.empty())
      return NcclResult::kInvalidArgument;
    Faults::instance().count("inits");
    if (init.blocking) Faults::instance().count("blocking inits");
    auto fresh = std::make_shared<SimCommunicator>(init.rank, init.size, init.blocking);
    const NcclResult result = fresh->join(init.ids);
    *comm = Table::instance().add(fresh);
    if (!init.blocking) return result;
    if (group.depth == 0) violation("init of a blocking communicator outside of a group");
    group.inside.push_back(std::make_unique<Inside>(fresh));
    group.inits.push_back(std::move(fresh));
    return NcclResult::kSuccess;
  }

  NcclResult asyncError(NcclComm comm, NcclResult* state) override {
    const CallScope scope(comm, "asyncError", kWhenInProgress | kWhenRevoked | kWhenFailed);
    if (!scope.comm) return NcclResult::kInvalidArgument;
    *state = scope.comm->poll();
    return NcclResult::kSuccess;
  }

  NcclResult finalize(NcclComm comm) override {
    const CallScope scope(comm, "finalize", 0);
    if (!scope.comm) return NcclResult::kInvalidUsage;
    if (const auto failure = enter("finalize", scope.comm->rank())) return *failure;
    if (Registrations::any(comm)) violation("finalize with memory registered");
    Faults::instance().count("finalizes");
    scope.comm->beginFinalize();
    const NcclResult begun = slow(*scope.comm, "finalize", NcclResult::kInProgress);
    if (!scope.comm->blocking()) return begun;
    const Inside inside(scope.comm);
    return scope.comm->awaitThrough();
  }

  NcclResult destroy(NcclComm comm) override {
    const CallScope scope(comm, "destroy", kWhenRevoked);
    if (!scope.comm) return NcclResult::kInvalidUsage;
    if (group.depth > 0 && !has(NcclFeature::kDeferredAbort)) {
      violation("destroy inside a group: this version frees at the call");
      return NcclResult::kInvalidUsage;
    }
    if (const auto failure = enter("destroy", scope.comm->rank())) return *failure;
    if (Registrations::any(comm)) violation("destroy with memory registered");
    Faults::instance().count("destroys");
    group.destroys.emplace_back(comm, scope.comm);
    if (group.depth == 0) cleanUp();
    return NcclResult::kSuccess;
  }

  NcclResult abort(NcclComm comm) override {
    const CallScope scope(comm, "abort",
                          kWhenInProgress | kWhenRevoked | kWhenFailed | kFromAnother);
    if (!scope.comm) return NcclResult::kInvalidArgument;
    Faults::instance().count("aborts");
    scope.comm->raiseStop();
    scope.comm->aborting = true;
    if (const auto failure = failureAt("abort", scope.comm->rank())) return *failure;
    if (!has(NcclFeature::kDeferredAbort)) Faults::instance().pause("abort", scope.comm->rank());
    group.aborts.emplace_back(comm, scope.comm);
    if (group.depth == 0) cleanUp();
    return NcclResult::kSuccess;
  }

  NcclResult revoke(NcclComm comm) override {
    // In progress, or after an error, the real one uses a job that it has freed.
    const CallScope scope(comm, "revoke", 0);
    if (!scope.comm) return NcclResult::kInvalidArgument;
    if (!has(NcclFeature::kRevoke)) {
      violation("revoke: this version has none");
      return NcclResult::kInvalidUsage;
    }
    if (const auto failure = enter("revoke", scope.comm->rank())) return *failure;
    Faults::instance().count("revokes");
    scope.comm->revoke();
    return slow(*scope.comm, "revoke", NcclResult::kSuccess);
  }

  NcclResult groupStart() override {
    ++group.depth;
    return NcclResult::kSuccess;
  }

  NcclResult groupEnd() override {
    if (group.depth == 0) {
      violation("groupEnd without groupStart");
      return NcclResult::kInvalidUsage;
    }
    if (--group.depth > 0) return NcclResult::kSuccess;
    NcclResult result = NcclResult::kSuccess;
    if (const auto failure = enter("group_end", -1)) result = *failure;
    for (const CommPtr& comm : std::exchange(group.inits, {})) {
      const NcclResult through = comm->awaitThrough();
      if (result == NcclResult::kSuccess) result = through;
    }
    auto launches = std::exchange(group.launches, {});
    const bool blocks = !launches.empty() && launches.front().first->blocking();
    for (auto& [comm, calls] : launches) {
      if (comm->blocking() != blocks) violation("blocking and non-blocking ones in one group");
      if (comm->aborting && !blocks) {
        violation("a communicator was aborted between a call on it and its group's end");
        continue;
      }
      if (result != NcclResult::kSuccess && result != NcclResult::kInProgress) break;
      const NcclResult launched =
          blocks ? launchAndWait(comm, std::move(calls)) : comm->launch(std::move(calls));
      if (launched != NcclResult::kSuccess) result = launched;
    }
    group.inside.clear();
    cleanUp();
    return result;
  }

  NcclResult allReduce(const void* in, void* out, size_t count, NcclType type, NcclRedOp op,
                       NcclComm comm, NativeStream stream) override {
    return call(comm, {CallKind::kAllreduce, in, out, count, type, op, 0, streamFrom(stream)});
  }
  NcclResult broadcast(const void* in, void* out, size_t count, NcclType type, int root,
                       NcclComm comm, NativeStream stream) override {
    return call(comm,
                {CallKind::kBroadcast, in, out, count, type, kNcclSum, root, streamFrom(stream)});
  }
  NcclResult reduce(const void* in, void* out, size_t count, NcclType type, NcclRedOp op, int root,
                    NcclComm comm, NativeStream stream) override {
    return call(comm, {CallKind::kReduce, in, out, count, type, op, root, streamFrom(stream)});
  }
  NcclResult allGather(const void* in, void* out, size_t count, NcclType type, NcclComm comm,
                       NativeStream stream) override {
    return call(comm,
                {CallKind::kAllgather, in, out, count, type, kNcclSum, 0, streamFrom(stream)});
  }
  NcclResult reduceScatter(const void* in, void* out, size_t count, NcclType type, NcclRedOp op,
                           NcclComm comm, NativeStream stream) override {
    return call(comm, {CallKind::kReduceScatter, in, out, count, type, op, 0, streamFrom(stream)});
  }
  NcclResult send(const void* in, size_t count, NcclType type, int peer, NcclComm comm,
                  NativeStream stream) override {
    return call(comm,
                {CallKind::kSend, in, nullptr, count, type, kNcclSum, peer, streamFrom(stream)});
  }
  NcclResult recv(void* out, size_t count, NcclType type, int peer, NcclComm comm,
                  NativeStream stream) override {
    return call(comm,
                {CallKind::kRecv, nullptr, out, count, type, kNcclSum, peer, streamFrom(stream)});
  }

  NcclResult createPreMulSum(NcclRedOp* op, const void* scalar, bool on_device, NcclType type,
                             NcclComm comm) override {
    const CallScope scope(comm, "createPreMulSum", 0);
    if (!scope.comm) return NcclResult::kInvalidUsage;
    if (const auto failure = enter("create_reduction", scope.comm->rank())) return *failure;
    *op = scope.comm->addPreMulSum(on_device ? PreMul{0, scalar, type}
                                             : PreMul{numberAt(scalar, type), nullptr, type});
    Faults::instance().count("live_reductions");
    return NcclResult::kSuccess;
  }
  NcclResult destroyRedOp(NcclRedOp op, NcclComm comm) override {
    const CallScope scope(comm, "destroyRedOp", kWhenRevoked | kWhenFailed);
    if (!scope.comm || !scope.comm->dropPreMulSum(op)) return NcclResult::kInvalidArgument;
    Faults::instance().count("live_reductions", -1);
    return NcclResult::kSuccess;
  }

  NcclResult registerBuffer(NcclComm comm, void* data, size_t bytes, void** handle) override {
    *handle = nullptr;
    const CallScope scope(comm, "registerBuffer", 0);
    if (!scope.comm || !Pin(data, bytes, "registerBuffer").ok()) return NcclResult::kInvalidUsage;
    if (const auto failure = enter("register", scope.comm->rank())) return *failure;
    Faults::instance().count("registrations");
    *handle = Registrations::add(comm, data, bytes);
    return NcclResult::kSuccess;
  }
  NcclResult deregisterBuffer(NcclComm comm, void* handle) override {
    const CallScope scope(comm, "deregisterBuffer", 0);
    if (!scope.comm) return NcclResult::kInvalidUsage;
    if (const auto failure = enter("deregister", scope.comm->rank())) return *failure;
    if (scope.comm->running()) violation("deregisterBuffer while operations run");
    setCurrentDevice(deviceCount() - 1);  // the real one may leave another device current
    if (Registrations::remove(comm, handle)) return NcclResult::kSuccess;
    violation("deregisterBuffer: the handle is not of a registration of this communicator");
    return NcclResult::kInvalidUsage;
  }

 private:
  static SimStream* streamFrom(NativeStream stream) { return static_cast<SimStream*>(stream); }

  // A call begins: it may be injected to block, or to fail.
  static std::optional<NcclResult> enter(const std::string& point, int rank) {
    Faults::instance().pause(point, rank);
    return failureAt(point, rank);
  }

  static std::optional<NcclResult> failureAt(const std::string& point, int rank) {
    const auto fault = Faults::instance().take(FaultAction::kFail, point, rank);
    if (!fault) return std::nullopt;
    return static_cast<NcclResult>(fault->code);
  }

  static NcclResult slow(SimCommunicator& comm, const char* point, NcclResult otherwise) {
    const auto fault = Faults::instance().take(FaultAction::kInProgress, point, comm.rank());
    if (!fault) return otherwise;
    comm.stayInProgress(fault->polls);
    return NcclResult::kInProgress;
  }

  static NcclResult call(NcclComm handle, NcclCall what) {
    const char* const name = toString(what.kind);
    const CallScope scope(handle, name, 0);
    if (!scope.comm) return NcclResult::kInvalidUsage;
    if (what.op > kNcclAvg) {
      what.multiplied = scope.comm->preMulSum(what.op);
      if (!what.multiplied) violation("an operation names a reduction that does not exist");
    }
    if (what.stream == nullptr || what.peer < 0 || what.peer >= scope.comm->size())
      return NcclResult::kInvalidArgument;
    if (const auto failure = enter(name, scope.comm->rank())) return *failure;
    if (group.depth == 0) return scope.comm->launch({what});
    for (auto& [comm, calls] : group.launches) {
      if (comm != scope.comm) continue;
      calls.push_back(what);
      return NcclResult::kSuccess;
    }
    if (scope.comm->blocking()) group.inside.push_back(std::make_unique<Inside>(scope.comm));
    group.launches.push_back({scope.comm, {what}});
    return NcclResult::kSuccess;
  }

  static NcclResult launchAndWait(const CommPtr& comm, std::vector<NcclCall> calls) {
    if (comm->freed()) violation("a blocking communicator was freed within a group of calls on it");
    comm->launch(std::move(calls));
    return comm->awaitThrough();
  }

  // Aborted ones go when what they have enqueued is over. Blocks.
  void cleanUp() const {
    for (auto& [handle, comm] : std::exchange(group.destroys, {})) {
      comm->awaitIdle();
      Table::instance().remove(handle);
    }
    auto aborts = std::exchange(group.aborts, {});
    for (auto& [handle, comm] : aborts) {
      if (has(NcclFeature::kDeferredAbort)) Faults::instance().pause("abort", comm->rank());
      if (comm->inside > 0) violation("abort freed a communicator while a call was inside");
      comm->awaitIdle();
      Table::instance().remove(handle);
    }
  }
};

}  // namespace

std::shared_ptr<NcclApi> makeSimNccl() {
  return std::make_shared<SimNccl>();
}

void forgetCommunicators() {
  Table::instance().clear();
}

NcclSnapshot ncclSnapshot() {
  NcclSnapshot snapshot = Table::instance().snapshot();
  snapshot.roots = Exchange::liveRoots();
  return snapshot;
}

}  // namespace torchft_ext::sim
