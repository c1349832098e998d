// The simulated NCCL's arithmetic.
#pragma once

#include <optional>
#include <vector>

#include "nccl/nccl_types.h"

namespace torchft_ext::sim {

// parts[rank] are `count` elements each; reduced in rank order into `out`. A factor multiplies each
// part first (PreMulSum). Short floating types are added in float and rounded once.
void reduceBytes(std::vector<std::vector<char>>& parts, void* out, size_t count, NcclType type,
                 NcclRedOp op, std::optional<double> factor);
// One number of that type.
double numberAt(const void* data, NcclType type);

}  // namespace torchft_ext::sim
