// The NCCL engine as groups ask for it by name.
#pragma once

#include "device/engine_registry.h"

namespace torchft_ext {

// "nccl". It rides on the CPU engine. Reads TORCHFT_EXT_NCCL_BLOCKING each time one is made.
EngineKind ncclEngineKind();

}  // namespace torchft_ext
