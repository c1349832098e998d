// CudaApi over the simulated device. Threads: as CudaApi says.
#pragma once

#include <memory>

#include "nccl/cuda_api.h"

namespace torchft_ext::sim {

std::shared_ptr<CudaApi> makeSimCuda();

}  // namespace torchft_ext::sim
