// A rank that cannot make its group has that told to the ranks that wait for it.
#pragma once

#include <string>

#include "base/deadline.h"
#include "c10d/store_adapter.h"

namespace torchft_ext {

// In the first epoch of a group whose members meet at this place. Blocks for two seconds at most,
// or the limit, until they have come to where they read it. Throws what a signal's handler throws.
void tellAbsence(const StorePlace& place, int rank, int size, Duration limit,
                 const std::string& why);

}  // namespace torchft_ext
