// The arithmetic of NCCL's kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "functions.h"

namespace torchft_ext::nccl_host {

// What an argument that is an address stands for.
uint64_t loadArgument(uint64_t address);

struct Reduction {
  DeviceOp op = DeviceOp::kSum;
  NcclType type = NcclType::kInt8;
  uint64_t argument = 0;  // as NCCL packs it

  void before(void* values, size_t count) const;  // what is done to a rank's own input
  void combine(void* into, const void* with, size_t count) const;
  void after(void* values, size_t count) const;  // what is done to the result
};

}  // namespace torchft_ext::nccl_host
