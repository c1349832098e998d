// An operation on its way into NCCL: what is called for it, on which communicator and stream.
//
// Owner: the stack of the issuing thread, or a call beside it (call_threads.h) with copies of its
// own. Threads: one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/operation.h"
#include "nccl/device_comm.h"

namespace torchft_ext {

struct DeviceCall {
  std::shared_ptr<const Operation> operation;
  bool flat = false;  // see StreamSide
  std::shared_ptr<DeviceComm> comm;
  NativeStream stream = nullptr;
  std::shared_ptr<void> scratch;  // of a barrier
};
using DeviceCalls = std::vector<DeviceCall>;

// Makes them in one group, in this order, on the communicators' device. To be called inside the
// gates. The first result that is an error, or the group's.
NcclResult callInGroup(NcclApi& nccl, const DeviceCalls& calls);

// The same with gates, for a thread that has nothing else to do. kInProgress: a gate was closed, or
// not free by the deadline.
NcclResult callThroughGates(const std::vector<std::shared_ptr<DeviceComm>>& comms,
                            const DeviceCalls& calls, Deadline deadline);

// Calls of one shape mostly need the same connections: alike in kind, dtype, reduction, root and
// peer, and sizes of the same power of two; of what is made of messages: in who gets one. Mostly:
// NCCL connects by algorithm, and may change that in between. Of those on `comm`.
uint64_t shapeOf(const DeviceCalls& calls, const DeviceComm& comm);

}  // namespace torchft_ext
