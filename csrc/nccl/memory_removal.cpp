#include "nccl/memory_removal.h"

#include <system_error>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "base/threads.h"
#include "comm/op_state.h"

namespace torchft_ext {
namespace {

using Kind = MemoryOutcome::Kind;

constexpr Duration kLook = std::chrono::milliseconds(1);
constexpr Duration kLastLines = milliseconds(200);  // of a helper that has found itself late

bool isOver(const DeviceComm& comm) {
  return comm.closed() || comm.setup().lifecycle->over();
}

// Shared by the caller and its helper, which may stay inside NCCL when the caller has gone.
class Removal {
 public:
  Removal(const std::vector<std::shared_ptr<DeviceComm>>& comms, CommMemory::Chosen chosen,
          Deadline deadline)
      : comms_(comms), chosen_(std::move(chosen)), deadline_(deadline) {}

  // On the helper.
  void run() {
    MemoryOutcome outcome;
    for (const auto& comm : comms_) {
      MemoryOutcome one = removeFrom(*comm);
      if (outcome.kind == Kind::kDone) outcome = std::move(one);
    }
    const MutexLock lock(mutex_);
    outcome_ = std::move(outcome);
  }
  MemoryOutcome outcome() const {
    const MutexLock lock(mutex_);
    return outcome_;
  }
  const std::vector<std::shared_ptr<DeviceComm>>& comms() const { return comms_; }

 private:
  MemoryOutcome removeFrom(DeviceComm& comm) const {
    while (!isOver(comm)) {
      {
        const GateEntry entry(comm.gate(), deadline_);
        const NcclResult state = entry.entered() ? comm.state() : NcclResult::kInProgress;
        if (state == NcclResult::kSuccess) return removeInside(comm);
        if (state != NcclResult::kInProgress) return {};
      }
      if (deadline_.expired()) return {Kind::kLate, "NCCL was at work on " + comm.setup().name};
      std::this_thread::sleep_for(kLook);
    }
    return {};
  }

  MemoryOutcome removeInside(DeviceComm& comm) const {
    // ncclCommDeregister may leave another device current (2.28.9).
    const OnDevice on_device(comm.setup().device, std::nothrow);
    const auto relaxed = comm.setup().platform->cuda->relaxCapture();
    const NcclResult result = comm.memory().remove(comm.api(), comm.handle(), chosen_);
    if (result == NcclResult::kSuccess) return {};
    const std::string text = comm.api().lastError(nullptr);
    return {Kind::kRefused, std::string("NCCL reported '") + toString(result) +
                                "' when it was to deregister memory in the communicator of " +
                                comm.setup().name + ", which keeps it to its end" +
                                (text.empty() ? "" : ": " + text)};
  }

  const std::vector<std::shared_ptr<DeviceComm>> comms_;
  const CommMemory::Chosen chosen_;  // outlives the caller too
  const Deadline deadline_;
  mutable Mutex mutex_;
  MemoryOutcome outcome_ GUARDED_BY(mutex_){Kind::kRefused, "the deregistration was cut short"};
};

// Nobody can call NCCL on them any more, or their memory cannot be let go of.
void failGenerations(const Removal& removal, const std::string& how) {
  for (const auto& comm : removal.comms()) {
    Failure failure = comm->setup().lifecycle->ownFailure(FailureKind::kTimeout, how);
    failure.op = "deregister_mem_pool";
    comm->setup().lifecycle->fail(std::move(failure));
  }
}

}  // namespace

MemoryOutcome removeMemory(const std::vector<std::shared_ptr<DeviceComm>>& comms,
                           const CommMemory::Chosen& chosen, Deadline deadline, Removing how) {
  std::vector<std::shared_ptr<DeviceComm>> concerned;
  for (const auto& comm : comms)
    if (!isOver(*comm)) concerned.push_back(comm);
  if (concerned.empty()) return {};
  const auto removal = std::make_shared<Removal>(concerned, chosen, deadline);
  OwnedThread helper("ft-nccl-call", [removal] { removal->run(); });
  const std::string stuck =
      "NCCL does not come back from deregistering memory: a member of the generation may be frozen";
  const Deadline last = deadline.isNever() ? deadline : Deadline::at(deadline.at() + kLastLines);
  try {
    while (!helper.join(last.orEarlier(kHookInterval)) && !last.expired())
      if (how == Removing::kForGood) runWaitHook();
  } catch (...) {  // a signal's handler: whoever called ends the generation
    helper.abandon("a signal interrupted the wait for NCCL to deregister memory");
    throw;
  }
  const bool ended = helper.join(Deadline::after(Duration::zero()));
  if (!ended) helper.abandon(stuck);
  const MemoryOutcome outcome = ended ? removal->outcome() : MemoryOutcome{Kind::kLate, stuck};
  if (outcome.kind == Kind::kLate && how == Removing::kForGood)
    failGenerations(*removal, outcome.why);
  return outcome;
}

}  // namespace torchft_ext
