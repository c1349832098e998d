// How reductions of device tensors are told to a device's library (NCCL), which knows fewer types
// than torch. Pure functions; any thread.
#pragma once

#include "c10d/adapter/arguments.h"
#include "device/device_platform.h"

namespace torchft_ext {

struct DeviceReduction {
  DType dtype = DType::kFloat;
  ReduceKind kind = ReduceKind::kSum;
  bool low_bit = false;  // keep only the lowest bit of each byte of the result
};

// TypeError for dtypes, ValueError for reductions that the library cannot do, with what it can.
//   bool              as bytes: SUM, MAX, BOR as MAX; PRODUCT, MIN, BAND as MIN; BXOR as SUM
//   complex           as real numbers: SUM, AVG, PREMUL_SUM
//   uint32, uint64    as signed: SUM, PRODUCT (two's complement)
//   float8            where the library has it (NCCL 2.24; it wants compute capability 9)
DeviceReduction deviceReductionOf(const Argument& argument, const at::Tensor& tensor,
                                  const c10d::ReduceOp& reduce_op, const DevicePlatform& platform);

// For operations that only move data: what such libraries lack goes as bytes.
DType movable(DType dtype);

}  // namespace torchft_ext
