// Which members of an epoch have said goodbye. An operation that begins later and needs one of them
// would wait for its deadline, and so would one that began before but cannot complete without it:
// NCCL says nothing. The latter gets a second's grace, since what the leaver had sent may be on its
// way.
//
// Owner: the communicator, its NCCL communicators, launches, and the control communicator's
// callback. Threads: any.
#pragma once

#include <optional>
#include <set>
#include <utility>

#include "base/deadline.h"
#include "base/mutex.h"
#include "comm/lifecycle.h"

namespace torchft_ext {

// How long what needs a leaver may go on after both its goodbye and the operation's begin.
constexpr Duration kLeaverGrace = std::chrono::seconds(1);

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

// Of an operation or an initialisation that is under way: looked at now and then by one thread.
class LeaverWatch {
 public:
  // under_way: it has begun, so that the leaver's part in it is all that can be missing. True: it
  // has waited for a leaver beyond the grace, and the epoch has failed.
  bool look(const PeersLeft& left, int peer, bool under_way, Lifecycle& lifecycle) {
    const std::optional<int> leaver = under_way ? left.neededBy(peer) : std::nullopt;
    if (!leaver) return false;
    if (!since_) since_ = Clock::now();
    if (Clock::now() - *since_ < kLeaverGrace) return false;
    Failure failure;
    failure.kind = FailureKind::kPeerLeft;
    failure.cause.rank = *leaver;
    failure.cause.how = "it left before its part in an operation was done";
    lifecycle.fail(std::move(failure));
    return true;
  }

 private:
  std::optional<Clock::time_point> since_;
};

}  // namespace torchft_ext
