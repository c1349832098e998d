// Ends the thread and listener that NCCL keeps behind a unique id until all ranks have come, which
// no abort tells of their end (NCCL 2.18 to 2.32, bootstrap.cc).
//
// Threads: any. Blocks for half a second at most, for milliseconds as a rule. Errors: none; what
// does not answer is left as it is.
#pragma once

#include "nccl/nccl_types.h"

namespace torchft_ext {

// Only of an id that this process asked for, and once nobody of it will come any more.
void releaseNcclRoot(const NcclUniqueId& id);

}  // namespace torchft_ext
