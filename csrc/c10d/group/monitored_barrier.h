// torch's monitored barrier: every other rank reports to rank 0, which answers all of them once all
// have come, or names those who have not. By messages, so that ranks that are inside a collective,
// or nowhere, are told from those that came.
//
// Threads: any. It blocks: rank 0 for the limit, its answers included, which have a second at
// least; others for a second more than the larger of the limit and the group's timeout, so that
// rank 0 is the first to speak.
// A signal's exception, or a failed barrier, fails the generation: whoever came, and whoever comes
// late, gets an error that names the ranks.
#pragma once

#include <cstdint>

#include "base/deadline.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

class Group;

struct MonitoredBarrier {
  Group& group;
  int64_t generation = 0;  // that the caller's rank and size belong to
  int rank = 0;
  int size = 1;
  Duration limit{0};      // zero: it runs out at once, unless the group has one rank
  bool name_all = false;  // of rank 0: false names the lowest of the ranks that did not come
};

// Null: all ranks came. Otherwise why not, in the words of torch's gloo.
FailurePtr await(const MonitoredBarrier& barrier);

}  // namespace torchft_ext
