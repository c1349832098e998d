// The operations of one generation that are issued and not yet complete, by number: what drain()
// and check() wait for. Numbers outlive their operations, so nothing here keeps one alive.
//
// Owner: the communicator and every operation it has under way. Threads: any.
#pragma once

#include <cstdint>
#include <set>

#include "base/mutex.h"

namespace torchft_ext {

class Outstanding {
 public:
  uint64_t begin();
  void end(uint64_t number);  // again: nothing
  uint64_t mark();            // the number that the next one gets
  // Waits until all below `mark` have ended. False: not by the deadline.
  bool awaitBelow(uint64_t mark, Deadline deadline);

 private:
  Mutex mutex_;
  CondVar changed_;
  std::set<uint64_t> numbers_ GUARDED_BY(mutex_);
  uint64_t next_ GUARDED_BY(mutex_) = 1;
};

}  // namespace torchft_ext
