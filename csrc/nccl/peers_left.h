// Which members of an epoch have said goodbye: an operation that begins later and needs one of them
// would wait for its deadline.
//
// Owner: the communicator, its launches, and the control communicator's callback. Threads: any.
#pragma once

#include <optional>
#include <set>

#include "base/mutex.h"

namespace torchft_ext {

class PeersLeft {
 public:
  void add(int rank) {
    MutexLock lock(mutex_);
    ranks_.insert(rank);
  }
  // One that an operation with `peer` (-1: all ranks) needs.
  std::optional<int> neededBy(int peer) const {
    MutexLock lock(mutex_);
    if (peer < 0) return ranks_.empty() ? std::nullopt : std::optional<int>(*ranks_.begin());
    return ranks_.count(peer) > 0 ? std::optional<int>(peer) : std::nullopt;
  }

 private:
  mutable Mutex mutex_;
  std::set<int> ranks_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
