#include "nccl/reap_batch.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "base/log.h"
#include "nccl/nccl_group.h"

namespace torchft_ext {
namespace {

constexpr Duration kCallerLeavesWithin = std::chrono::seconds(1);
constexpr Duration kRevokedWithin = std::chrono::milliseconds(250);
constexpr Duration kRootReachedWithin = std::chrono::milliseconds(250);
constexpr Duration kLook = std::chrono::microseconds(100);

bool inProgress(NcclApi& api, NcclComm comm) {
  NcclResult state = NcclResult::kSuccess;
  const NcclResult asked = api.asyncError(comm, &state);
  return asked == NcclResult::kInProgress ||
         (asked == NcclResult::kSuccess && state == NcclResult::kInProgress);
}

// True: no longer at work.
bool awaitQuiet(NcclApi& api, NcclComm comm, Deadline deadline,
                const std::function<bool()>& givenUp) {
  while (inProgress(api, comm)) {
    if (deadline.expired() || givenUp()) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

bool revokes(const DeviceComm& comm) {
  return comm.ready() && comm.api().has(NcclFeature::kRevoke);
}

}  // namespace

ReapBatch::ReapBatch(Comms comms, How how, Deadline retire_by, Duration limit,
                     std::function<void()> on_cut)
    : comms_(std::move(comms)),
      how_(how),
      retire_by_(retire_by),
      deadline_(Deadline::after(limit)),
      on_cut_(std::move(on_cut)) {}

void ReapBatch::run() {
  // What NCCL frees must not end a graph capture of another thread's.
  const auto relaxed = comms_.front()->setup().platform->cuda->relaxCapture();
  for (const auto& comm : comms_) comm->close();
  Comms free;
  Comms busy;
  const Deadline soon = deadline_.orEarlier(kCallerLeavesWithin);
  for (const auto& comm : comms_) (comm->gate().awaitEmpty(soon) ? free : busy).push_back(comm);
  const Comms rest = how_ == How::kRetire ? retire(free) : free;
  if (!rest.empty() || !busy.empty()) callHooks();
  cut(rest);
  // Whose caller does not come back is not told to stop: its waiters are released all the same.
  for (const auto& comm : busy) comm->markCut();
  on_cut_();
  abort(rest);
  Comms late;
  for (const auto& comm : busy) {
    if (comm->gate().awaitEmpty(deadline_)) {
      late.push_back(comm);
    } else {
      log(LogLevel::kError, "a call into NCCL does not return: " + comm->setup().name +
                                " cannot be aborted and is left as it is");
    }
  }
  cut(late);
  abort(late);
  releaseRoots(comms_);
}

void ReapBatch::giveUp() {
  for (const auto& comm : comms_) comm->markCut();
  on_cut_();
}

void ReapBatch::callHooks() const {
  std::set<const Lifecycle*> told;
  for (const auto& comm : comms_) {
    const auto& setup = comm->setup();
    if (!setup.before_revoke || !setup.lifecycle->failure()) continue;
    if (!told.insert(setup.lifecycle.get()).second) continue;
    try {
      setup.before_revoke(setup.lifecycle);
    } catch (const std::exception& error) {
      log(LogLevel::kError, std::string("what comes before a revoke failed: ") + error.what());
    }
  }
}

// What has to be aborted instead.
ReapBatch::Comms ReapBatch::retire(const Comms& comms) const {
  Comms finalizing;
  Comms rest;
  for (const auto& comm : comms) {
    const bool clean = comm->handle() != nullptr && comm->ready() && !comm->captured() &&
                       !comm->setup().lifecycle->failure();
    if (clean) comm->api().finalize(comm->handle());
    (clean ? finalizing : rest).push_back(comm);
  }
  const Deadline deadline = retire_by_.orEarlier(deadline_);
  for (const auto& comm : finalizing) {
    const auto failed = [&] { return comm->setup().lifecycle->failure() != nullptr; };
    if (!awaitQuiet(comm->api(), comm->handle(), deadline, failed)) {
      rest.push_back(comm);
      continue;
    }
    comm->api().destroy(comm->handle());
    comm->markCut();
    comm->markGone();
  }
  on_cut_();
  return rest;
}

// A revoke goes on in a thread of NCCL's, and lowers the flag that stops kernels at its end: an
// abort before that could be undone by it.
void ReapBatch::cut(const Comms& comms) const {
  Comms revoked;
  for (const auto& comm : comms) {
    if (comm->handle() == nullptr || !revokes(*comm)) continue;
    const OnDevice on_device(comm->setup().device);
    comm->api().revoke(comm->handle());
    comm->markCut();
    revoked.push_back(comm);
  }
  on_cut_();
  const Deadline deadline = deadline_.orEarlier(kRevokedWithin);
  for (const auto& comm : revoked)
    awaitQuiet(comm->api(), comm->handle(), deadline, [] { return false; });
}

// In one group: all are told to stop when abort() is called, and freed when the group ends.
void ReapBatch::abort(const Comms& comms) const {
  Comms aborted;
  for (const auto& comm : comms) {
    if (comm->handle() == nullptr) {
      comm->markGone();
    } else {
      aborted.push_back(comm);
    }
    if (comm->captured() && comm->handle() != nullptr)
      log(LogLevel::kWarning, comm->setup().name +
                                  " was captured by a graph: it is aborted, and freed when that "
                                  "graph is; do not replay it");
  }
  if (aborted.empty()) return on_cut_();
  NcclGroup group(aborted.front()->api());
  for (const auto& comm : aborted) {
    const OnDevice on_device(comm->setup().device);
    comm->api().abort(comm->handle());
    comm->markCut();
  }
  on_cut_();
  group.end();
  for (const auto& comm : aborted) comm->markGone();
  on_cut_();
}

// The thread and listener behind an id wait until all ranks have come, and are told of no abort
// (NCCL 2.18 to 2.31, bootstrap.cc). They do end when ranks come that disagree about their number:
// so two come that do.
void ReapBatch::releaseRoots(const Comms& comms) const {
  for (const auto& comm : comms) {
    const auto id = comm->abandonedRoot();
    if (!id || !comm->gone()) continue;
    const OnDevice on_device(comm->setup().device);
    NcclApi& api = comm->api();
    std::array<NcclComm, 2> decoys{};
    for (size_t i = 0; i < decoys.size(); ++i) {
      const int size = comm->setup().size + 1 + static_cast<int>(i);
      api.init(&decoys[i], {0, size, {*id}, comm->setup().name + ", to release its root"});
    }
    const Deadline deadline = Deadline::after(kRootReachedWithin);
    for (NcclComm decoy : decoys)
      if (decoy != nullptr) awaitQuiet(api, decoy, deadline, [] { return false; });
    NcclGroup group(api);
    for (NcclComm decoy : decoys)
      if (decoy != nullptr) api.abort(decoy);
  }
}

}  // namespace torchft_ext
