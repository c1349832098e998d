// Time that operations get beside their limits, until the first of them is complete: what torch's
// add_ephemeral_timeout() asks for (torch 2.14), for ranks that come late for once, since one of
// them compiles. Several add up, and each ends by itself.
//
// Owner: the backend. Threads: any. It never blocks. After a failure of the generation: its
// operations are complete, and so the time is over; what no operation has followed yet stays for
// the next one.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "comm/op_state.h"

namespace torchft_ext {

class EphemeralTimeouts {
 public:
  void add(Duration extra) {
    const MutexLock lock(mutex_);
    added_.push_back({extra, nullptr});
  }

  // The limit of an operation that is issued now, which would have this one.
  Duration onTopOf(Duration limit) {
    const MutexLock lock(mutex_);
    const auto over = [](const Added& one) { return one.first && one.first->done(); };
    added_.erase(std::remove_if(added_.begin(), added_.end(), over), added_.end());
    for (const Added& one : added_)  // an overlong one stays so
      limit = limit > kCentury || one.extra > kCentury ? Duration::max() : limit + one.extra;
    return limit;
  }

  void issued(const std::shared_ptr<OpState>& state) {
    const MutexLock lock(mutex_);
    for (Added& one : added_) {
      if (!one.first) one.first = state;
    }
  }

 private:
  struct Added {
    Duration extra;
    std::shared_ptr<OpState> first;  // null: none has been issued since
  };

  Mutex mutex_;
  std::vector<Added> added_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
