#include "nccl/memory_registry.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/log.h"
#include "comm/op_state.h"
#include "nccl/memory_removal.h"
#include "nccl/pause.h"

namespace torchft_ext {
namespace {

using Kind = MemoryOutcome::Kind;
using Segments = std::vector<MemorySegment>;

constexpr Duration kUndoneWithin = std::chrono::seconds(1);

bool contains(const Segments& segments, const MemorySegment& one) {
  return std::find(segments.begin(), segments.end(), one) != segments.end();
}

// The turn that takeTurn() got, if it did; until the end of the scope.
class Turn {
 public:
  Turn(CallGate& gate, bool taken) : gate_(gate), taken_(taken) {}
  ~Turn() {
    if (taken_) gate_.leave();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  CallGate& gate_;
  const bool taken_;
};

}  // namespace

MemoryRegistry::~MemoryRegistry() {
  std::vector<std::shared_ptr<void>> owners;
  {
    const MutexLock lock(mutex_);
    for (auto& [id, known] : pools_) owners.push_back(std::move(known.owner));
  }
  if (owners.empty()) return;
  if (fork_count_ == forkCount()) {
    releaseLater(std::move(owners));
  } else {
    releaseNever(std::move(owners));
  }
}

MemoryOutcome MemoryRegistry::takeTurn(Deadline deadline) {
  while (!turn_.enter(deadline.orEarlier(kHookInterval))) {
    if (turn_.closed()) return {Kind::kClosed, "the group was shut down"};
    if (deadline.expired())
      return {Kind::kLate, "another thread was registering or deregistering memory"};
    runWaitHook();
  }
  return {};
}

MemoryOutcome MemoryRegistry::add(MemoryPool pool, Deadline deadline) {
  MemoryOutcome outcome = takeTurn(deadline);
  const Turn turn(turn_, outcome.kind == Kind::kDone);
  if (outcome.kind != Kind::kDone) return outcome;
  const Segments fresh = note(pool);
  try {
    for (const auto& comm : live()) {
      outcome = bringUpToDate(*comm, deadline);
      if (outcome.kind != Kind::kDone) break;
    }
  } catch (...) {
    undo(fresh);
    throw;
  }
  if (outcome.kind != Kind::kDone) undo(fresh);
  return outcome;
}

MemoryOutcome MemoryRegistry::remove(const PoolId& id, Deadline deadline) {
  MemoryOutcome outcome = takeTurn(deadline);
  const Turn turn(turn_, outcome.kind == Kind::kDone);
  if (outcome.kind != Kind::kDone) return outcome;
  Known forgotten;  // ends without the lock
  {
    const MutexLock lock(mutex_);
    const auto found = pools_.find(id);
    if (found == pools_.end()) return {Kind::kUnknown, "pool " + describe(id)};
    forgotten = std::move(found->second);
    pools_.erase(found);
  }
  return removeMemory(
      live(), [id](const MemorySegment& one) { return one.pool == id; }, deadline,
      Removing::kForGood);
}

bool MemoryRegistry::knows(const PoolId& id) const {
  const MutexLock lock(mutex_);
  return pools_.count(id) > 0;
}

void MemoryRegistry::close() {
  turn_.close();
  std::map<PoolId, Known> forgotten;  // ends without the lock
  const MutexLock lock(mutex_);
  forgotten.swap(pools_);
}

// The segments that were not known. The first owner of a pool stays: they are one object's.
Segments MemoryRegistry::note(MemoryPool& pool) {
  Segments fresh;
  const MutexLock lock(mutex_);
  const auto [found, is_new] = pools_.try_emplace(pool.id);
  Known& known = found->second;
  if (is_new) known.owner = std::move(pool.owner);
  for (const MemorySegment& segment : pool.segments) {
    if (contains(known.segments, segment)) continue;
    known.segments.push_back(segment);
    fresh.push_back(segment);
  }
  return fresh;
}

// The owner, where nothing of its pool is known any more: to be let go of without the lock.
std::shared_ptr<void> MemoryRegistry::forget(const Segments& segments) {
  if (segments.empty()) return nullptr;
  const MutexLock lock(mutex_);
  const auto found = pools_.find(segments.front().pool);
  if (found == pools_.end()) return nullptr;
  std::erase_if(found->second.segments, [&](const auto& one) { return contains(segments, one); });
  if (!found->second.segments.empty()) return nullptr;
  auto owner = std::move(found->second.owner);
  pools_.erase(found);
  return owner;
}

// After an error: what one call has registered. It was never used but by an operation issued
// meanwhile, which NCCL would have to be waited for.
void MemoryRegistry::undo(const Segments& segments) {
  const auto owner = forget(segments);
  const auto chosen = [segments](const MemorySegment& one) { return contains(segments, one); };
  std::string why;
  try {
    why = removeMemory(live(), chosen, Deadline::after(kUndoneWithin), Removing::kUndo).why;
  } catch (const std::exception& error) {  // no thread to call on
    why = error.what();
  }
  if (why.empty()) return;
  log(LogLevel::kWarning,
      "memory whose registration failed stays registered in other communicators: " + why);
}

std::vector<MemoryRegistry::Owned> MemoryRegistry::on(c10::DeviceIndex device) const {
  std::vector<Owned> found;
  const MutexLock lock(mutex_);
  for (const auto& [id, known] : pools_)
    for (const MemorySegment& segment : known.segments)
      if (segment.device == device) found.push_back({segment, known.owner});
  return found;
}

MemoryRegistry::Comms MemoryRegistry::attached() const {
  Comms found;
  const MutexLock lock(mutex_);
  for (const auto& weak : comms_)
    if (auto comm = weak.lock()) found.push_back(std::move(comm));
  return found;
}

MemoryRegistry::Comms MemoryRegistry::live() const {
  Comms found = attached();
  std::erase_if(found, [](const auto& comm) { return comm->closed(); });
  return found;
}

MemoryRegistry::Comms MemoryRegistry::notFreed() const {
  Comms found = attached();
  std::erase_if(found, [](const auto& comm) {
    return !comm->memory().holdsAny() || comm->gone() || (comm->captured() && comm->cut());
  });
  return found;
}

bool MemoryRegistry::attach(const std::shared_ptr<DeviceComm>& comm, Deadline deadline) {
  {
    // First, so that either this call sees a new pool or add() sees the communicator.
    const MutexLock lock(mutex_);
    std::erase_if(comms_, [](const auto& weak) { return weak.expired(); });
    comms_.push_back(comm);
  }
  const MemoryOutcome outcome = bringUpToDate(*comm, deadline);
  if (outcome.kind == Kind::kRefused)
    comm->setup().lifecycle->fail(
        comm->setup().lifecycle->ownFailure(FailureKind::kInternal, outcome.why));
  return outcome.kind == Kind::kDone && !comm->setup().lifecycle->over();
}

// kDone also where the communicator's generation is over, or it is in error, which its poller will
// say: those to come are what counts then.
MemoryOutcome MemoryRegistry::bringUpToDate(DeviceComm& comm, Deadline deadline) const {
  Pause pause;
  while (!comm.closed() && !comm.setup().lifecycle->over()) {
    {
      const GateEntry entry(comm.gate(), deadline.orEarlier(kHookInterval));
      const NcclResult state = entry.entered() ? comm.state() : NcclResult::kInProgress;
      if (state == NcclResult::kSuccess) return registerMissing(comm);
      if (state != NcclResult::kInProgress) return {};
    }
    if (deadline.expired())
      return {Kind::kLate, "NCCL was at work on the communicator of " + comm.setup().name};
    pause.next();
  }
  return {};
}

// Inside the gate: what is known is read there, so that what add() takes back is either not seen
// here or found in the communicator.
MemoryOutcome MemoryRegistry::registerMissing(DeviceComm& comm) const {
  const std::vector<Owned> known = on(comm.setup().device.index());
  if (known.empty()) return {};
  const OnDevice on_device(comm.setup().device);
  const auto relaxed = comm.setup().platform->cuda->relaxCapture();
  Segments added;
  for (const auto& [segment, owner] : known) {
    if (comm.memory().has(segment)) continue;
    const NcclResult result = comm.memory().add(comm.api(), comm.handle(), segment, owner);
    if (result == NcclResult::kSuccess) {
      added.push_back(segment);
      continue;
    }
    const std::string text = comm.api().lastError(nullptr);
    comm.memory().remove(comm.api(), comm.handle(),
                         [&](const MemorySegment& one) { return contains(added, one); });
    return {Kind::kRefused, std::string("NCCL reported '") + toString(result) +
                                "' when it was to register " + describe(segment) +
                                " in the communicator of " + comm.setup().name +
                                (text.empty() ? "" : ": " + text)};
  }
  return {};
}

}  // namespace torchft_ext
