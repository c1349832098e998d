// NCCL's own library on the simulated device: its host code as it is, from init to abort, over a
// CUDA and kernels of this folder. README.md says what that shows and what it cannot.
//
// Threads: any, after open().
#pragma once

#include <memory>
#include <string>

#include "nccl/nccl_platform.h"

namespace torchft_ext::nccl_host {

// The library that TORCHFT_EXT_NCCL_LIB names. Once for a process; throws std::runtime_error.
std::shared_ptr<const NcclPlatform> open();

}  // namespace torchft_ext::nccl_host
