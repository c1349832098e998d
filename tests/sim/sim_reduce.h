// The simulated NCCL's arithmetic.
#pragma once

#include <cstddef>
#include <vector>

#include "nccl/nccl_types.h"

namespace torchft_ext::sim {

// parts[rank] are `count` elements each; reduced in rank order into `out`. Short floating types are
// added in float and rounded once; the average of whole numbers is cut off. Whatever is no built-in
// reduction sums.
void reduceBytes(const std::vector<std::vector<char>>& parts, void* out, size_t count,
                 NcclType type, NcclRedOp op);
// `count` elements times a number of their type.
std::vector<char> multiplied(const void* data, size_t count, NcclType type, double factor);
// How many of a world of one's elements NCCL multiplies: its 2.19 to 2.29.3 leave out the last ones
// of some counts (oneRankReduce() in onerank.cu), which keep what was in the output.
size_t reducedByOneRank(size_t count, NcclType type);
// One number of that type.
double numberAt(const void* data, NcclType type);

}  // namespace torchft_ext::sim
