// Communicators of epochs that failed, kept for a while because the next epoch's may be made from
// them: revoked, quiet and sound, as NCCL's shrink wants its parent. At most one for each engine
// and device.
//
// Owner: the process's NCCL threads and the reaper, which alone ends what is due. Each is owned by
// this from park() until claim() hands it out, to one caller and once, or until the reaper takes
// it. Threads: any; never blocks, calls nothing of NCCL's. After close(): nothing is kept.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "nccl/device_comm.h"

namespace torchft_ext {

// For as long as it is parked, its device memory is not free.
constexpr Duration kParkedFor = std::chrono::seconds(30);

class Heritage {
 public:
  using Comms = std::vector<std::shared_ptr<DeviceComm>>;

  explicit Heritage(Duration parked_for = kParkedFor) : parked_for_(parked_for) {}

  // One that has a lineage. False: its engine is gone, or it is the end; the caller aborts it. One
  // of the same engine and device that is here already is due.
  bool park(const std::shared_ptr<DeviceComm>& comm);
  // From here on the caller alone may call NCCL on it, and has to hand it to the reaper. Null:
  // none.
  std::shared_ptr<DeviceComm> claim(const std::weak_ptr<const void>& heir, c10::Device device);

  // What has been here too long, has been replaced, or whose engine is gone.
  Comms takeDue();
  Deadline nextDue() const;  // by time
  Comms close();             // all
  int64_t parked() const;
  // Communicators that were made from one of these.
  void countInherited() { ++inherited_; }
  int64_t inherited() const { return inherited_; }

 private:
  struct Parked {
    std::shared_ptr<DeviceComm> comm;
    Deadline until;
    bool isFor(const std::weak_ptr<const void>& heir, c10::Device device) const;
  };

  const Duration parked_for_;
  std::atomic<int64_t> inherited_{0};
  mutable Mutex mutex_;
  std::vector<Parked> parked_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace torchft_ext
