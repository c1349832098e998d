// Environment variables for collectives in shared memory. Every engine on host memory reads them:
// that of torch's groups, of C++ and C programs, and of child processes, which inherit them.
//   TORCHFT_EXT_SHARED_MEMORY        0 or 1: whether they share
//   TORCHFT_EXT_SHARED_MEMORY_PLANS  a file: the table of plans (docs/shared_memory.md)
#pragma once

#include <string>

#include "host/host_engine.h"

namespace torchft_ext {

// Changes the options as it says. Not empty: which variable makes no sense, and why. Reads the
// file.
std::string useSharedEnvironment(HostEngineOptions* options);

}  // namespace torchft_ext
