// A group's failures by kind, and the last one.
//
// Owner: the group, and the subscribers of its generations, which may outlive it. Threads: any.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/deadline.h"
#include "base/mutex.h"
#include "comm/lifecycle.h"

namespace torchft_ext {

struct FailureCounts {
  Mutex mutex;
  std::array<uint64_t, 10> by_kind GUARDED_BY(mutex){};
  FailurePtr last GUARDED_BY(mutex);
  Clock::time_point last_at GUARDED_BY(mutex);

  void count(const FailurePtr& failure) {
    MutexLock lock(mutex);
    ++by_kind[static_cast<size_t>(failure->kind) % by_kind.size()];
    last = failure;
    last_at = Clock::now();
  }
};

}  // namespace torchft_ext
