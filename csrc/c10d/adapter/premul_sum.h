// The factor of ReduceOp PREMUL_SUM, from c10d's form to an operation's. Each rank's own factor
// multiplies its own contribution. Threads: any.
#pragma once

#include "c10d/adapter/arguments.h"

namespace torchft_ext {

struct Factor {
  std::array<uint8_t, 8> item{};  // one item of the operation's dtype
  // Where it was given on the tensor's device: of that dtype, read when the operation runs, to be
  // kept until then. Enqueues a conversion on the current stream where it is of another.
  at::Tensor on_device;
};

// dtype: the one that is reduced. TypeError for dtypes that are not float, double, half or bfloat16
// and for complex factors; ValueError for a missing factor, or one on another device than the
// tensor (one on the CPU may go with any). Does not block.
Factor factorOf(const Argument& argument, const at::Tensor& tensor, DType dtype,
                const c10d::ReduceOp& reduce_op);

}  // namespace torchft_ext
