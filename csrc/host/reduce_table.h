// The loops of one instruction set. host/reduce.cpp chooses; the files reduce_*.cpp hold one each.
// Nothing of the standard library's templates: what is compiled for one processor must not be what
// the linker keeps for all.
#pragma once

#include <cstddef>

namespace torchft_ext {

struct ReduceTable {
  static constexpr int kItemTypes = 10;  // DType's first ones
  static constexpr int kReductions = 9;  // ReduceKind's
  using Combine = void (*)(void* into, const void* from, size_t items);
  using Multiply = void (*)(void* data, const void* from, const void* factor, size_t items);
  using Divide = void (*)(void* data, int divisor, size_t items);
  // null: there is no such operation
  Combine combine[kItemTypes][kReductions];
  Multiply multiply[kItemTypes];
  Divide divide[kItemTypes];
};

const ReduceTable& baselineReductions();
const ReduceTable& chosenReductions();  // the best that this processor has
const ReduceTable* avx2Reductions();    // null: not compiled for x86-64

}  // namespace torchft_ext
