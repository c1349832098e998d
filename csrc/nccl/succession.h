// How a communicator of all ranks is made out of the one of an earlier epoch, where all ranks can.
// Who can says so as they meet (bootstrap.h), and one that cannot is enough: then all make it
// plainly. Nobody uses the new one before all have said that they have it, since NCCL's answers may
// differ between ranks; one that fails fails the epoch, and the parent is not tried again.
//
// Owner: the issuing thread's stack while the communicator is made. What was claimed and not taken
// over by the new communicator is handed to the reaper at the end at the latest, so also where the
// wait hook throws.
#pragma once

#include <memory>
#include <vector>

#include "nccl/bootstrap.h"
#include "nccl/device_comm.h"
#include "nccl/nccl_threads.h"

namespace torchft_ext {

class Succession {
 public:
  // Claims what is parked for that communicator's engine and device, if it is one of all ranks.
  Succession(NcclThreads& threads, const DeviceComm& comm);
  ~Succession() { decline(); }
  Succession(const Succession&) = delete;
  Succession& operator=(const Succession&) = delete;

  // What meet() takes along: the parent's id; 0: there is none, or no way leads from it.
  uint64_t offer() const { return parent_ ? parent_->setup().lineage->id : 0; }
  // It is not to be used. True: there was one, whose end is now under way.
  bool decline();
  // All ranks offered the same. Blocks as DeviceComm::initialise() does, and calls the wait hook.
  bool bringUp(DeviceComm& comm, Bootstrap bootstrap);

 private:
  NcclThreads& threads_;
  std::shared_ptr<DeviceComm> parent_;
  std::vector<int> excluded_;
  bool unfit_ = false;  // claimed, and handed on at once
};

}  // namespace torchft_ext
