// For x86-64 with AVX2 and F16C: the build compiles this file for them.
#if defined(__AVX2__) && defined(__F16C__)
#include "host/reduce_loops.h"

namespace torchft_ext {

const ReduceTable* avx2Reductions() {
  return &kTable;
}

}  // namespace torchft_ext
#else
#include "host/reduce_table.h"

namespace torchft_ext {

const ReduceTable* avx2Reductions() {
  return nullptr;
}

}  // namespace torchft_ext
#endif
