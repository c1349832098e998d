#include "nccl/reap_batch.h"

#include <algorithm>
#include <map>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/log.h"
#include "nccl/nccl_group.h"

namespace torchft_ext {
namespace {

constexpr Duration kCallerLeavesWithin = std::chrono::seconds(1);
// NCCL needs up to half a second to revoke, since a thread of its looks only so often whether it is
// to end (ncclProxyServiceUDS; 2.28.9, measured).
constexpr Duration kRevokedWithin = std::chrono::seconds(1);
constexpr Duration kLook = std::chrono::microseconds(100);
// Of the host engine's thread, which may be at work on something else, and the network.
constexpr Duration kToldWithin = std::chrono::milliseconds(100);
constexpr Duration kLookForFailure = std::chrono::milliseconds(10);

bool isNoError(NcclResult result) {
  return result == NcclResult::kSuccess || result == NcclResult::kInProgress;
}

NcclResult stateOf(NcclApi& api, NcclComm comm) {
  NcclResult state = NcclResult::kSuccess;
  const NcclResult asked = api.asyncError(comm, &state);
  return asked == NcclResult::kSuccess ? state : asked;
}

// Once NCCL is no longer at work: kSuccess, or an error. kInProgress: it still is.
NcclResult awaitQuiet(NcclApi& api, NcclComm comm, Deadline deadline,
                      const std::function<bool()>& givenUp) {
  while (true) {
    const NcclResult state = stateOf(api, comm);
    if (state != NcclResult::kInProgress || deadline.expired() || givenUp()) return state;
    std::this_thread::sleep_for(kLook);
  }
}

// What it returned; kInProgress: it has not.
NcclResult awaitReturn(CallThreads::Call& call, Deadline deadline,
                       const std::function<bool()>& givenUp) {
  while (true) {
    const auto result = call.await(deadline.orEarlier(kLookForFailure));
    if (result) return *result;
    if (deadline.expired() || givenUp()) return NcclResult::kInProgress;
  }
}

// Of a blocking one a revoke would block. Only one that is quiet and sound, as the question after
// its state finds out: NCCL up to 2.31 uses the job of a call in progress, or of one that failed,
// after it has freed it there (ncclCommEnsureReady). And none that a graph has captured: after a
// revoke NCCL's abort frees it under the graph, and without one it waits for the graph's end
// (commReclaim, 2.28.9).
bool mayBeRevoked(const DeviceComm& comm) {
  return comm.handle() != nullptr && comm.ready() && !comm.blocking() && !comm.captured() &&
         comm.api().has(NcclFeature::kRevoke) &&
         stateOf(comm.api(), comm.handle()) == NcclResult::kSuccess;
}

void reportInside(const DeviceComm& comm) {
  log(LogLevel::kError, "a call into NCCL does not return: " + comm.setup().name +
                            " cannot be aborted and is left as it is");
}

// NCCL frees registrations that are left after what they need (commFree, 2.28.9): a healthy end
// leaves none. Not before an abort, since peers that may be dead would be asked.
NcclResult deregisterAll(DeviceComm& comm) {
  const auto all = [](const MemorySegment&) { return true; };
  // ncclCommDeregister may leave another device current (2.28.9).
  const OnDevice on_device(comm.setup().device, std::nothrow);
  return comm.memory().remove(comm.api(), comm.handle(), all);
}

NcclResult finalize(DeviceComm& comm) {
  const OnDevice on_device(comm.setup().device, std::nothrow);
  const NcclResult freed = deregisterAll(comm);
  return isNoError(freed) ? comm.api().finalize(comm.handle()) : freed;
}

// The same on another thread, inside the gate. Null: it has not begun.
std::shared_ptr<CallThreads::Call> finalizeBeside(const std::shared_ptr<DeviceComm>& comm) {
  struct Leave {
    CallGate& gate;
    ~Leave() { gate.leave(); }
  };
  comm->gate().enterToEnd();
  auto call = comm->setup().calls->start([comm] {
    const Leave at_the_end{comm->gate()};
    const auto relaxed = comm->setup().platform->cuda->relaxCapture();  // for this thread
    return finalize(*comm);
  });
  if (!call) comm->gate().leave();
  return call;
}

}  // namespace

ReapBatch::ReapBatch(Comms comms, How how, Deadline retire_by, Duration limit,
                     std::function<void()> on_cut)
    : comms_(std::move(comms)),
      how_(how),
      retire_by_(retire_by),
      deadline_(Deadline::after(limit)),
      half_(Deadline::after(limit / 2)),
      on_cut_(std::move(on_cut)) {}

void ReapBatch::run() {
  // A thread that has named no device speaks to the first one, and makes a context there.
  const OnDevice on_device(comms_.front()->setup().device, std::nothrow);
  // What this thread frees in NCCL must not end a graph capture of another thread's.
  const auto relaxed = comms_.front()->setup().platform->cuda->relaxCapture();
  for (const auto& comm : comms_) comm->close();
  if (how_ == How::kAbort) tellMembers(comms_);
  Comms free;
  Comms busy;
  Comms inside;
  const Deadline soon = deadline_.orEarlier(kCallerLeavesWithin);
  for (const auto& comm : comms_) {
    if (how_ == How::kAbort && comm->blocking() && comm->gate().occupied()) {
      inside.push_back(comm);
    } else if (comm->gate().awaitEmpty(soon)) {
      free.push_back(comm);
    } else {
      (comm->blocking() ? inside : busy).push_back(comm);
    }
  }
  Comms rest;
  Comms finalized;
  for (const auto& comm : how_ == How::kRetire ? retire(free, finalized) : free)
    (comm->gate().occupied() ? inside : rest).push_back(comm);
  // Whose caller does not come back is not told to stop: its waiters are released all the same.
  for (const auto& comm : busy) comm->markCut();
  abortAll(rest);
  destroyAll(finalized);
  Comms late;
  for (const auto& comm : busy) {
    if (comm->gate().awaitEmpty(deadline_)) {
      late.push_back(comm);
    } else {
      reportInside(*comm);
    }
  }
  abortAll(late);
  releaseRoots(comms_);
  abortInside(inside);
}

bool ReapBatch::mayTakeLong() const {
  return std::any_of(comms_.begin(), comms_.end(),
                     [](const auto& comm) { return comm->captured() || comm->gate().occupied(); });
}

void ReapBatch::giveUp() {
  for (const auto& comm : comms_) comm->markCut();
  on_cut_();
}

// What has to be aborted instead; `finalized` is left to be destroyed.
ReapBatch::Comms ReapBatch::retire(const Comms& comms, Comms& finalized) const {
  struct Finalizing {
    std::shared_ptr<DeviceComm> comm;
    std::shared_ptr<CallThreads::Call> call;  // of a blocking one
  };
  std::vector<Finalizing> finalizing;
  Comms rest;
  for (const auto& comm : comms) {
    const bool clean = comm->handle() != nullptr && comm->ready() && !comm->captured() &&
                       !comm->setup().lifecycle->failure();
    const OnDevice on_device(comm->setup().device, std::nothrow);
    const auto call = clean && comm->blocking() ? finalizeBeside(comm) : nullptr;
    const bool begun =
        call != nullptr || (clean && !comm->blocking() && isNoError(finalize(*comm)));
    if (begun) {
      finalizing.push_back({comm, call});
    } else {
      rest.push_back(comm);
    }
  }
  const Deadline deadline = retire_by_.orEarlier(deadline_);
  for (const auto& one : finalizing) {
    DeviceComm& comm = *one.comm;
    const auto failed = [&] { return comm.setup().lifecycle->failure() != nullptr; };
    const OnDevice on_device(comm.setup().device, std::nothrow);
    // Destroying one that is in error leaves NCCL's group open on this thread (2.28.9).
    const NcclResult ended = one.call ? awaitReturn(*one.call, deadline.orEarlier(half_), failed)
                                      : awaitQuiet(comm.api(), comm.handle(), deadline, failed);
    if (ended != NcclResult::kSuccess) {
      rest.push_back(one.comm);
      continue;
    }
    comm.markAtRest();
    finalized.push_back(one.comm);
  }
  on_cut_();
  return rest;
}

// In one group, since each takes NCCL up to half a second (as kRevokedWithin says), where that has
// a meaning for destroys: since 2.22.3, as for aborts.
void ReapBatch::destroyAll(const Comms& comms) const {
  if (comms.empty()) return;
  NcclApi& api = comms.front()->api();
  std::optional<NcclGroup> group;
  if (api.has(NcclFeature::kDeferredAbort)) group.emplace(api);
  for (const auto& comm : comms) {
    const OnDevice on_device(comm->setup().device, std::nothrow);
    comm->api().destroy(comm->handle());
    comm->markCut();
  }
  group.reset();
  for (const auto& comm : comms) comm->markGone();
  on_cut_();
}

// A kernel that is told to stop runs through its remaining steps, and hands what lies in its
// buffers to the next rank, whose kernel takes it for data and ends (prims_simple.h,
// prims_ll.h; 2.28.9). So the members must have been told before: whoever looks at a result there
// looks for news first (EventPoller). Again: nothing.
void ReapBatch::tellMembers(const Comms& comms) {
  std::map<const Lifecycle*, std::pair<std::shared_ptr<ControlCommunicator>, std::string>> tellers;
  for (const auto& comm : comms) {
    const DeviceCommSetup& setup = comm->setup();
    auto control = comm->takeControl();
    if (!control || setup.size < 2 || !setup.lifecycle->failure()) continue;
    if (told_.insert(setup.lifecycle.get()).second)
      tellers[setup.lifecycle.get()] = {std::move(control), setup.name};
  }
  // All begin before any is waited for: a generation with a member that cannot be reached takes the
  // whole time.
  for (const auto& [generation, teller] : tellers)
    teller.first->tellOfFailure(Deadline::after(Duration::zero()));
  const Deadline deadline = Deadline::after(kToldWithin);
  for (const auto& [generation, teller] : tellers) {
    if (teller.first->tellOfFailure(deadline)) continue;
    log(LogLevel::kWarning, "not every member of " + teller.second +
                                " could be told of its failure before NCCL was aborted");
  }
}

// They come last: a thread whose group stays open can end no other communicator. It does where one
// does not return, or something goes wrong here: its end would free what someone is inside of.
void ReapBatch::abortInside(const Comms& comms) {
  if (comms.empty()) return;
  tellMembers(comms);
  NcclGroup group(comms.front()->api());
  bool all = group.started() == NcclResult::kSuccess;  // else an abort would free at once
  try {
    for (const auto& comm : comms)
      if (!all || !tellInside(*comm)) comm->markCut();
    on_cut_();
    for (const auto& comm : comms) {
      if (all && comm->gate().awaitEmpty(deadline_)) continue;
      all = false;
      reportInside(*comm);
    }
  } catch (...) {
    group.leaveOpen();
    throw;
  }
  if (!all) return group.leaveOpen();
  group.end();
  for (const auto& comm : comms) comm->markGone();
  on_cut_();
  releaseRoots(comms);
}

// False: there is nothing to tell, or no handle by the deadline.
bool ReapBatch::tellInside(DeviceComm& comm) const {
  while (!comm.handleIsKnown() && comm.gate().occupied()) {
    if (deadline_.expired()) return false;
    std::this_thread::sleep_for(kLook);
  }
  NcclComm handle = comm.handleIsKnown() ? comm.knownHandle() : nullptr;
  if (handle == nullptr) return false;
  const OnDevice on_device(comm.setup().device, std::nothrow);
  comm.api().abort(handle);
  comm.markCut();
  return true;
}

// One that a graph has captured is freed when the graph is, and holds up no other.
void ReapBatch::abortAll(const Comms& comms) {
  tellMembers(comms);
  Comms others;
  Comms captured;
  for (const auto& comm : comms) (comm->captured() ? captured : others).push_back(comm);
  abort(others);
  for (const auto& comm : captured) abort({comm});
}

// In one group: each is told to stop when abort() is called, and freed when the group ends. A
// revoke stops kernels at once, goes on in a thread of NCCL's and lowers the flag that stops them
// at its end, which could undo an abort: that follows when it has ended, and comes last where it
// has not, since NCCL joins it there.
void ReapBatch::abort(const Comms& comms) {
  Comms revoked;
  Comms others;
  for (const auto& comm : comms) {
    if (comm->handle() == nullptr) {
      comm->markGone();
    } else {
      (revoke(*comm) ? revoked : others).push_back(comm);
    }
  }
  on_cut_();
  if (revoked.empty() && others.empty()) return;
  NcclGroup group(comms.front()->api());
  // Those that are not ready are at work in NCCL: nothing has told them to stop yet.
  std::partition(others.begin(), others.end(), [](const auto& comm) { return !comm->ready(); });
  for (const auto& comm : others) tellToStop(*comm);
  on_cut_();
  Comms ended = std::move(others);
  Comms at_work;
  const Deadline deadline = deadline_.orEarlier(kRevokedWithin);
  for (const auto& comm : revoked) {
    const auto never = [] { return false; };
    const NcclResult state = awaitQuiet(comm->api(), comm->handle(), deadline, never);
    (state == NcclResult::kInProgress ? at_work : ended).push_back(comm);
    if (state != NcclResult::kInProgress) tellToStop(*comm);
  }
  for (const auto& comm : at_work) tellToStop(*comm);
  group.end();
  ended.insert(ended.end(), at_work.begin(), at_work.end());
  for (const auto& comm : ended) comm->markGone();
  on_cut_();
}

// False: it may not be.
bool ReapBatch::revoke(DeviceComm& comm) const {
  const OnDevice on_device(comm.setup().device, std::nothrow);
  if (!mayBeRevoked(comm)) return false;
  comm.api().revoke(comm.handle());
  comm.markCut();
  return true;
}

void ReapBatch::tellToStop(DeviceComm& comm) const {
  if (comm.captured())
    log(LogLevel::kWarning, comm.setup().name +
                                " was captured by a graph: it is aborted, and freed when that "
                                "graph is; do not replay it");
  const OnDevice on_device(comm.setup().device, std::nothrow);
  comm.api().abort(comm.handle());
  comm.markCut();
}

void ReapBatch::releaseRoots(const Comms& comms) const {
  for (const auto& comm : comms) {
    const auto id = comm->abandonedRoot();
    if (!id || !comm->gone()) continue;  // else its own ranks may still come
    comm->api().releaseRoot(*id);
  }
}

}  // namespace torchft_ext
