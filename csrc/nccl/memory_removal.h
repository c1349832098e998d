// Deregisters memory in live communicators, on a thread of its own: NCCL may ask a peer's proxy
// there and wait for an answer that a frozen peer does not give.
#pragma once

#include <memory>
#include <vector>

#include "nccl/memory_registry.h"

namespace torchft_ext {

// kForGood: calls the wait hook, which may throw; where it is late the generations fail, since what
// they were to give back stays registered. kUndo: neither, for who has an error to tell already.
enum class Removing { kForGood, kUndo };

// Blocks until the deadline at most. Whose generation is over or in error is left alone: NCCL frees
// what is registered with the communicator. kRefused: NCCL's words; kLate: the thread
// ("ft-nccl-call") is registered as stuck while it is inside NCCL.
MemoryOutcome removeMemory(const std::vector<std::shared_ptr<DeviceComm>>& comms,
                           const CommMemory::Chosen& chosen, Deadline deadline, Removing how);

}  // namespace torchft_ext
