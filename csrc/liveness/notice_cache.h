// What is known of generations that are not live here: notices ahead of their generation, and how
// past ones ended. Bounded in number and time; the oldest go first.
//
//   unknown  notices are kept for when it begins           (kAheadFor, kMostAhead)
//   live     not here: FailurePropagation's
//   over     notices are behind and dropped; the outcome answers who asks (kOverFor, kMostOver)
// A generation that is over and has been forgotten looks unknown; what is then kept of it expires.
//
// Owner: FailurePropagation. Threads: its owner's. Pure: no clock, never blocks.
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "liveness/notice.h"

namespace torchft_ext {

class NoticeCache {
 public:
  using Time = Clock::time_point;
  static constexpr std::chrono::seconds kAheadFor{60};
  static constexpr std::chrono::seconds kOverFor{120};
  static constexpr size_t kMostAhead = 512;
  static constexpr size_t kMostOver = 512;

  // Of a generation that is not live here: dropped if it is over, and if the same has been said.
  void keep(Time now, const Notice& notice);
  // The generation begins: what came ahead of it, in that order.
  std::vector<Notice> begin(Time now, const Nonce& generation);
  void end(Time now, const Notice& outcome);
  const Notice* outcomeOf(const Nonce& generation) const;  // null: unknown; until the next call

  size_t ahead() const { return ahead_.size(); }
  size_t over() const { return over_.size(); }

 private:
  struct Entry {
    Time until;
    Notice notice;
  };
  using Entries = std::deque<Entry>;

  static void add(Entries& entries, size_t most, Time until, const Notice& notice);
  static void expire(Entries& entries, Time now);

  Entries ahead_;
  Entries over_;
};

}  // namespace torchft_ext
