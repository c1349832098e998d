// The NCCL engine: communicators for device memory, under the same generations, deadlines and
// failure notices as the CPU engine.
//
// Every generation has a control communicator, made by another engine (the CPU's): it carries what
// NCCL cannot, the news of failures and the unique ids, and in a group for all devices the
// operations on host memory too. NCCL's own communicators are made when a device is first used, or
// at once for a bound one.
//
// Owner: groups share it. Threads: any. form() blocks as the control engine's does.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <optional>

#include "comm/communicator.h"
#include "nccl/nccl_platform.h"

namespace torchft_ext {

class MemoryRegistry;

struct NcclEngineOptions {
  // its communicator is made with the generation (device_id=)
  std::optional<c10::Device> bound_device;
  bool high_priority = false;  // of the communicators' streams
  // In larger worlds NCCL's bootstrap gets several roots, where it can (2.23). As in torch's nccl
  // (TORCH_NCCL_RANKS_PER_ROOT).
  int ranks_per_root = 128;
  // Communicators whose calls return when NCCL is through (device_comm.h), where the library can
  // free one in which a call waits (NcclFeature::kDeferredAbort); else non-blocking ones. This
  // process's alone: members need not do it alike.
  bool blocking_calls = false;
  std::shared_ptr<MemoryRegistry> memory{};  // one group's; null: no pools are registered
};

// Whether an abort of a blocking communicator in which a call waits is known to go well with this
// version: it can, and it is none of later ones whose sources nobody has read.
bool knowsBlockingAborts(const NcclApi& nccl);

std::shared_ptr<Engine> makeNcclEngine(std::shared_ptr<const NcclPlatform> platform,
                                       std::shared_ptr<Engine> control,
                                       const NcclEngineOptions& options);
// Ends the threads that all NCCL engines share (event poller, reaper). False: one did not end by
// the deadline; it is registered as stuck.
bool stopNcclEngines(Deadline deadline);

}  // namespace torchft_ext
