// A group's memory pools that are registered with NCCL.
//
// NCCL registers memory with a communicator; a user registers a pool with the group. So each new
// communicator of all ranks gets what is registered for its device before its first operation, and
// those that live get what comes later at once. Those of two ranks get none. NCCL requires that all
// ranks of an operation pass registered buffers or none does, so all ranks of a group have to
// register alike.
//
// Owner: the backend and its engine; communicators are seen weakly. Threads: any. add() and
// remove() run one at a time. Destruction calls nothing in NCCL. No lock is held over a call into
// NCCL or the end of a pool's owner.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "device/pool_registry.h"
#include "nccl/call_gate.h"
#include "nccl/comm_memory.h"
#include "nccl/device_comm.h"

namespace torchft_ext {

class MemoryRegistry : public PoolRegistry {
 public:
  MemoryRegistry() = default;
  ~MemoryRegistry() override;  // on whatever thread ends the last generation: see releaseLater()
  MemoryRegistry(const MemoryRegistry&) = delete;
  MemoryRegistry& operator=(const MemoryRegistry&) = delete;

  MemoryOutcome add(MemoryPool pool, Deadline deadline) override;
  // NCCL may wait for a peer there: on a helper thread, which is abandoned at the deadline; the
  // generations concerned fail then, and their communicators keep the pool's owner.
  MemoryOutcome remove(const PoolId& id, Deadline deadline) override;
  bool knows(const PoolId& id) const override;
  void close() override;

  // A communicator of all ranks has become ready, and nothing was issued on it. False: its
  // generation is over (and has failed, if this call is what ended it), or the deadline has passed.
  bool attach(const std::shared_ptr<DeviceComm>& comm, Deadline deadline);
  // Between two generations: those that have memory registered and that NCCL has not freed, so that
  // their kernels may still write into that of live peers. One that a graph has captured counts
  // until it is cut, since it is freed only with the graph.
  std::vector<std::shared_ptr<DeviceComm>> notFreed() const;

 private:
  using Comms = std::vector<std::shared_ptr<DeviceComm>>;
  struct Known {
    std::shared_ptr<void> owner;
    std::vector<MemorySegment> segments;
  };
  struct Owned {
    MemorySegment segment;
    std::shared_ptr<void> owner;
  };

  MemoryOutcome takeTurn(Deadline deadline);
  std::vector<MemorySegment> note(MemoryPool& pool);  // takes the owner of one that is new
  std::shared_ptr<void> forget(const std::vector<MemorySegment>& segments);
  std::vector<Owned> on(c10::DeviceIndex device) const;
  Comms attached() const;
  Comms live() const;
  MemoryOutcome bringUpToDate(DeviceComm& comm, Deadline deadline) const;
  MemoryOutcome registerMissing(DeviceComm& comm) const;
  void undo(const std::vector<MemorySegment>& segments);

  const uint64_t fork_count_ = forkCount();
  CallGate turn_;  // of add() and remove(); closed: the group was shut down
  mutable Mutex mutex_;
  std::map<PoolId, Known> pools_ GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<DeviceComm>> comms_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
