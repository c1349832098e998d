// Element-wise reductions on spans of memory: one table of loops for all item types and reductions,
// compiled for several instruction sets, of which the processor's best is taken at run time.
// Single-threaded; nothing allocates. The memory need not be aligned.
//
// The results are those of ATen's kernels bit for bit (half and bfloat16: computed in float,
// rounded to nearest even, after each step), but for what ATen itself leaves open: the payload of a
// NaN, and which zero kMin and kMax take of two with different signs (here the negative one is
// less, so that no order of the operands matters).
//
// bool: SUM, MAX, BOR = or; PRODUCT, MIN, BAND = and. BAND, BOR and BXOR are for integers and bool.
// All throw std::logic_error for an item type or reduction that they do not know.
#pragma once

#include "comm/operation.h"

namespace torchft_ext {

// into = into (op) from; kAvg and kPreMulSum add. bytes is a multiple of the item size; the two do
// not overlap.
void reduceInto(uint8_t* into, const uint8_t* from, size_t bytes, DType dtype, ReduceKind op);
// data = from * factor, which is one item; floating types. data may be from.
void multiplyInto(uint8_t* data, const uint8_t* from, size_t bytes, DType dtype,
                  const uint8_t* factor);
// data = data / divisor; integers truncate towards zero. kBool is refused above.
void divideBy(uint8_t* data, size_t bytes, DType dtype, int divisor);

}  // namespace torchft_ext
