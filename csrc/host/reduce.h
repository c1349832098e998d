// Element-wise reductions on spans of memory, by ATen's vectorised kernels. Single-threaded (they
// run on the loop thread; ATen's own thread pool is not entered). bool: SUM, MAX, BOR = or;
// PRODUCT, MIN, BAND = and. BAND, BOR and BXOR are for integers and bool.
#pragma once

#include "comm/operation.h"

namespace torchft_ext {

// into = into (op) from; kAvg and kPreMulSum add. bytes is a multiple of the item size.
void reduceInto(uint8_t* into, const uint8_t* from, size_t bytes, DType dtype, ReduceKind op);
// into = into + from (bool: or), for spans too short to be worth a kernel's call; the same bits.
void addShort(uint8_t* into, const uint8_t* from, size_t bytes, DType dtype);
// data = from * factor, which is one item; floating types.
void multiplyInto(uint8_t* data, const uint8_t* from, size_t bytes, DType dtype,
                  const uint8_t* factor);
// data = data / divisor; integers truncate towards zero. kBool is refused above.
void divideBy(uint8_t* data, size_t bytes, DType dtype, int divisor);

}  // namespace torchft_ext
