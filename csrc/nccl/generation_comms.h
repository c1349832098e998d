// A generation's NCCL communicators: one per device for all ranks, one per device and peer for
// messages between two, each made when it is first needed.
//
// Owner: the communicator. Threads: get() on the thread whose turn it is to issue, which blocks;
// takeAll() from any, never blocks: from then on there are none, and none is made.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "comm/control_communicator.h"
#include "nccl/bootstrap.h"
#include "nccl/device_comm.h"
#include "nccl/nccl_engine.h"
#include "nccl/nccl_threads.h"

namespace torchft_ext {

class GenerationComms {
 public:
  struct Setup {
    std::shared_ptr<const NcclPlatform> platform;
    std::shared_ptr<ControlCommunicator> control;
    std::shared_ptr<Lifecycle> lifecycle;
    NcclEngineOptions options;
    std::shared_ptr<NcclThreads> threads{};  // these two by the communicator
    std::shared_ptr<PeersLeft> left{};
  };
  // For whom one is made: what messages name, and how long it may take.
  struct Need {
    OpKind kind = OpKind::kBarrier;
    int64_t seq = -1;
    Deadline deadline = Deadline::never();
  };
  explicit GenerationComms(Setup setup) : setup_(std::move(setup)) {}

  // peer: -1 for all ranks. Null: the generation is over, or the deadline has passed. The wait hook
  // may throw.
  std::shared_ptr<DeviceComm> get(c10::Device device, int peer, const Need& need);
  bool has(c10::Device device, int peer) const;

  std::vector<std::shared_ptr<DeviceComm>> takeAll();
  // Whether a graph that may be replayed holds operations of one of them.
  bool anyCaptured() const;
  // Asks each that nobody is calling for an asynchronous error. Any thread.
  void lookForErrors() const;

 private:
  using Key = std::pair<c10::DeviceIndex, int>;
  std::shared_ptr<DeviceComm> find(const Key& key) const;
  std::shared_ptr<DeviceComm> make(c10::Device device, int peer);
  bool bringUp(DeviceComm& comm, int peer, const Need& need);
  static bool initialise(DeviceComm& comm, const Bootstrap& bootstrap);
  int rootsOf(const DeviceComm& comm) const;
  void awaitRoom(c10::Device device, Deadline deadline) const;
  std::string nameOf(c10::Device device, int peer) const;

  const Setup setup_;
  std::map<int, uint64_t> ordinals_;  // the issuing thread's: by peer, how many were made
  mutable Mutex mutex_;
  std::map<Key, std::shared_ptr<DeviceComm>> comms_ GUARDED_BY(mutex_);
  bool over_ GUARDED_BY(mutex_) = false;
};

}  // namespace torchft_ext
