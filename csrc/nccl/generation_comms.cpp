#include "nccl/generation_comms.h"

#include <algorithm>
#include <string>

#include "base/log.h"
#include "nccl/bootstrap.h"
#include "nccl/memory_registry.h"

namespace torchft_ext {
namespace {

constexpr Duration kRoomWithin = std::chrono::seconds(2);

}  // namespace

std::shared_ptr<DeviceComm> GenerationComms::find(const Key& key) const {
  MutexLock lock(mutex_);
  const auto found = comms_.find(key);
  return found == comms_.end() ? nullptr : found->second;
}

bool GenerationComms::has(c10::Device device, int peer) const {
  const auto comm = find({device.index(), peer});
  return comm && comm->ready();
}

std::shared_ptr<DeviceComm> GenerationComms::get(c10::Device device, int peer, const Need& need) {
  auto comm = find({device.index(), peer});
  if (comm && comm->ready()) return comm;
  if (!comm) comm = make(device, peer);
  if (!comm || !bringUp(*comm, peer, need)) return nullptr;
  const auto& memory = setup_.options.memory;
  return peer >= 0 || !memory || memory->attach(comm, need.deadline) ? comm : nullptr;
}

// Known from the start, so that the end of the generation also ends one that is being initialised.
std::shared_ptr<DeviceComm> GenerationComms::make(c10::Device device, int peer) {
  const GenerationIdentity& identity = setup_.lifecycle->identity();
  DeviceCommSetup comm{setup_.platform,
                       setup_.lifecycle,
                       device,
                       identity.rank,
                       identity.size,
                       nameOf(device, peer),
                       setup_.options.high_priority,
                       peer,
                       setup_.left};
  comm.control = setup_.control;
  if (setup_.options.blocking_calls) comm.calls = setup_.threads->calls;
  if (peer >= 0) {
    comm.rank = identity.rank < peer ? 0 : 1;
    comm.size = 2;
  }
  auto made = std::make_shared<DeviceComm>(std::move(comm));
  MutexLock lock(mutex_);
  if (over_) return nullptr;
  comms_[{device.index(), peer}] = made;
  return made;
}

bool GenerationComms::bringUp(DeviceComm& comm, int peer, const Need& need) {
  const DeviceCommSetup& setup = comm.setup();
  awaitRoom(setup.device, need.deadline);
  const OnDevice on_device(setup.device);  // whose context the change of mode needs
  // What NCCL allocates must not end a capture of another thread's.
  const auto relaxed = setup.platform->cuda->relaxCapture();
  const int roots = rootsOf(comm);
  const Bootstrap bootstrap{*setup_.control,
                            setup_.lifecycle,
                            need.kind,
                            need.seq,
                            need.deadline,
                            static_cast<int>(setup.device.type()),
                            ordinals_[peer]++,
                            peer,
                            roots};
  return (setup.size == 1 || meet(bootstrap)) && initialise(comm, bootstrap);
}

bool GenerationComms::initialise(DeviceComm& comm, const Bootstrap& bootstrap) {
  const DeviceCommSetup& setup = comm.setup();
  NcclUniqueId id;
  const bool makes_id = makesId(setup.rank, setup.size, bootstrap.roots);
  if (makes_id) {
    const NcclResult made = comm.api().getUniqueId(&id);
    if (made != NcclResult::kSuccess) {
      comm.fail(made, "making an id for");
      return false;
    }
    comm.madeRoot(id);
  }
  if (setup.size == 1) return comm.initialise({id}, bootstrap.deadline);
  const auto ids = spreadUniqueIds(bootstrap, makes_id ? &id : nullptr);
  return ids && comm.initialise(*ids, bootstrap.deadline) &&
         (setup.peer < 0 || comm.connectBothWays(bootstrap.deadline));
}

int GenerationComms::rootsOf(const DeviceComm& comm) const {
  if (!comm.api().has(NcclFeature::kScalableInit)) return 1;
  return rootsFor(comm.setup().size, setup_.options.ranks_per_root);
}

// While communicators of an earlier generation are being freed, making new ones would hold two
// generations' device memory at once, and their initialisation would wait inside the driver for the
// others' end. Bounded: what cannot be freed must not hold up the next generation.
void GenerationComms::awaitRoom(c10::Device device, Deadline deadline) const {
  const Deadline until = Deadline::after(kRoomWithin).orEarlier(deadline);
  while (!setup_.threads->reaper.awaitEnded(device, until.orEarlier(kHookInterval))) {
    if (setup_.lifecycle->over()) return;
    if (until.expired()) {
      log(LogLevel::kWarning, "NCCL communicators on " + device.str() +
                                  " are still being ended; new ones are made beside them");
      return;
    }
    runWaitHook();
  }
}

void GenerationComms::lookForErrors() const {
  std::vector<std::shared_ptr<DeviceComm>> comms;
  {
    MutexLock lock(mutex_);
    comms.reserve(comms_.size());
    for (const auto& [key, comm] : comms_) comms.push_back(comm);
  }
  for (const auto& comm : comms) comm->lookForError();
}

bool GenerationComms::anyCaptured() const {
  MutexLock lock(mutex_);
  return std::any_of(comms_.begin(), comms_.end(),
                     [](const auto& entry) { return entry.second->captured(); });
}

std::vector<std::shared_ptr<DeviceComm>> GenerationComms::takeAll() {
  std::vector<std::shared_ptr<DeviceComm>> taken;
  MutexLock lock(mutex_);
  over_ = true;
  taken.reserve(comms_.size());
  for (auto& [key, comm] : comms_) taken.push_back(std::move(comm));
  comms_.clear();
  return taken;
}

std::string GenerationComms::nameOf(c10::Device device, int peer) const {
  const GenerationIdentity& identity = setup_.lifecycle->identity();
  return "'" + identity.group + "' generation " + std::to_string(identity.generation) + " on " +
         device.str() + (peer < 0 ? "" : " with rank " + std::to_string(peer));
}

}  // namespace torchft_ext
