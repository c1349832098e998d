// Which members of a generation have said goodbye. An operation that begins later and needs one of
// them would wait for its deadline, and so would one that began before but cannot complete without
// it: NCCL says nothing. The latter gets a second's grace, since what the leaver had sent may be on
// its way.
//
// Owner: the communicator, its NCCL communicators, launches, and the control communicator's
// callback. Threads: any.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "base/mutex.h"
#include "comm/lifecycle.h"

namespace torchft_ext {

// How long what needs a leaver may go on after both its goodbye and the operation's begin.
constexpr Duration kLeaverGrace = std::chrono::seconds(1);

struct Leaver {
  int rank = -1;
  bool begins_another = false;  // generation: it is no departure then
};

class PeersLeft {
 public:
  void add(const Leaver& leaver) {
    MutexLock lock(mutex_);
    leavers_.emplace(leaver.rank, leaver);
  }
  // One that an operation with `peer` (-1: all ranks) needs.
  std::optional<Leaver> neededBy(int peer) const {
    MutexLock lock(mutex_);
    const auto found = peer < 0 ? leavers_.begin() : leavers_.find(peer);
    return found == leavers_.end() ? std::nullopt : std::optional<Leaver>(found->second);
  }

 private:
  mutable Mutex mutex_;
  std::map<int, Leaver> leavers_ GUARDED_BY(mutex_);
};

inline constexpr const char* kLeftTooSoon = "it left before its part in an operation was done";

// how: where it is one.
inline Failure failureOf(const Leaver& leaver, std::string how) {
  Failure failure;
  failure.kind = leaver.begins_another ? FailureKind::kAborted : FailureKind::kPeerLeft;
  failure.cause.rank = leaver.rank;
  failure.cause.how = leaver.begins_another ? kBeganAnother : std::move(how);
  return failure;
}

// Of an operation or an initialisation that is under way: looked at now and then by one thread.
class LeaverGrace {
 public:
  // under_way: it has begun, so that the leaver's part in it is all that can be missing. True: it
  // has waited for a leaver beyond the grace, and the generation has failed.
  bool look(const PeersLeft& left, int peer, bool under_way, Lifecycle& lifecycle) {
    const std::optional<Leaver> leaver = under_way ? left.neededBy(peer) : std::nullopt;
    if (!leaver) return false;
    if (!since_) since_ = Clock::now();
    if (Clock::now() - *since_ < kLeaverGrace) return false;
    lifecycle.fail(failureOf(*leaver, kLeftTooSoon));
    return true;
  }

 private:
  std::optional<Clock::time_point> since_;
};

}  // namespace torchft_ext
