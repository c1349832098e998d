// The CUDA runtime that torch loaded, found at run time. No cuda.h.
#pragma once

#include <memory>
#include <string>
#include <variant>

#include "nccl/cuda_api.h"

namespace torchft_ext {

// Any thread. Or why there is none: this torch has no CUDA, or lacks what is needed here.
std::variant<std::shared_ptr<CudaApi>, std::string> loadCudaRuntime();

}  // namespace torchft_ext
