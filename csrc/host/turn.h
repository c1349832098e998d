// How much an engine's thread copies and reduces in local memory before it looks at its other
// descriptors again.
#pragma once

#include <cstddef>
#include <vector>

#include "comm/strided_copy.h"

namespace torchft_ext {

constexpr size_t kLocalBytesPerTurn = size_t{4} << 20;

// A turn's worth. False: there is more to do, in another turn.
inline bool copySome(std::vector<StridedCopy>& copies) {
  size_t budget = kLocalBytesPerTurn;
  return runAll(copies, &budget);
}

}  // namespace torchft_ext
