// For every processor of the architecture.
#include "host/reduce_loops.h"

namespace torchft_ext {

const ReduceTable& baselineReductions() {
  return kTable;
}

}  // namespace torchft_ext
