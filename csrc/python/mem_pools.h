// Memory pools from Python: torch.cuda.MemPool, or whatever has its id and snapshot().
#pragma once

#include <pybind11/pybind11.h>

#include "device/pool_registry.h"

namespace torchft_ext {

// With the GIL. TypeError or ValueError that names what was expected and found. The result keeps
// the object alive; its end takes the GIL by itself.
MemoryPool poolOf(const char* operation, const pybind11::object& pool);
PoolId poolIdOf(const char* operation, const pybind11::object& pool);

}  // namespace torchft_ext
