// Asks the members that a long wait is for what they have issued, and says which of them has not
// issued the operation: that one, and no member that waits as well.
//
// An operation is unknown here until it has waited for longer than its generation asks after; the
// watchdog then tells of it once a second (Lifecycle::listenToWaits()). With each call of waits():
//   quiet  -> asked     each member that it may wait for gets a kQuestion, one a second at most for
//                       all operations together, and none while its last one is not answered
//   asked  -> known     all have reported, or kAnswerWithin has passed: who has not answered is
//                       named with that. Now the operation's waitedFor() says who is waited for,
//                       the log has one line for it in all, and the wait is counted
// until the operation has ended. Nothing is ended here, and nothing here holds up an end: a failure
// of the generation, abort() too, drops this object with what it had asked; a report that comes
// later is dropped by its owner.
//
// Its time is what its owner says, and comes from the steady clock.
//
// Owner: LongWaits, while its generation is up. Threads: loop only, where members' questions are
// answered too, so that an answer needs neither their main thread nor an interpreter's lock. It
// never blocks; callbacks run inside its methods and must not destroy it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "comm/op_state.h"
#include "host/issue_report.h"

namespace torchft_ext {

// How long operations have waited for each rank. Owner: the generation and its communicator.
// Threads: any.
class WaitTimes {
 public:
  explicit WaitTimes(int size) : times_(static_cast<size_t>(size)) {}
  void add(int rank, Duration time) {
    MutexLock lock(mutex_);
    times_[static_cast<size_t>(rank)] += time;
  }
  std::vector<Duration> all() const {
    MutexLock lock(mutex_);
    return times_;
  }

 private:
  mutable Mutex mutex_;
  std::vector<Duration> times_ GUARDED_BY(mutex_);  // by rank
};

class WaitInquiry {
 public:
  static constexpr Duration kAskEvery = std::chrono::seconds(1);
  static constexpr Duration kAnswerWithin = std::chrono::seconds(1);

  struct Wait {
    std::shared_ptr<OpState> op;
    std::vector<int> peers{};  // whom it may wait for
    int root = 0;              // of a collective
    bool in_log = true;        // false: it is no operation of the user's
  };
  struct Callbacks {
    std::function<void(int peer, uint64_t place)> ask;
    // Calls settle() then.
    std::function<void(Clock::time_point when)> wake;
    std::function<std::string(int peer)> name;  // "rank 3 (host b, pid 812)"
  };

  WaitInquiry(int size, std::shared_ptr<WaitTimes> times, Callbacks callbacks)
      : peers_(static_cast<size_t>(size)),
        times_(std::move(times)),
        callbacks_(std::move(callbacks)) {}

  // All that wait now, perhaps none. One collective at most: those behind it do not wait for
  // members.
  void waits(const std::vector<Wait>& waits, Clock::time_point now);
  void reported(int peer, const IssueReport& report, Clock::time_point now);
  void settle(Clock::time_point now);

 private:
  struct Peer {
    Clock::time_point asked_at = Clock::time_point::min();
    bool awaited = false;  // its report
    IssueReport report{};
  };
  // An operation that waits.
  struct Entry {
    Wait wait;
    std::vector<int> named{};           // who was waited for, when it was last known
    Clock::time_point counted_until{};  // of times_
    bool logged = false;
  };
  struct Known {
    std::vector<int> named;
    std::string text;  // one clause for each of them
  };

  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
  Entry& entryOf(const Wait& wait);
  void ask(int rank, uint64_t place, Clock::time_point now);
  bool isKnown(const Entry& entry, Clock::time_point now);
  // What it is to be named with; empty: it has issued this operation.
  std::string whyNamed(const Wait& wait, int rank, Clock::time_point now);
  Known judge(const Wait& wait, Clock::time_point now);
  void conclude(Entry& entry, Clock::time_point now);
  void count(Entry& entry, Clock::time_point until);
  void dropEnded();
  // Those that are not among these: they wait for nobody any more, but for their bytes.
  void dropOthers(const std::vector<Wait>& waits);

  std::vector<Peer> peers_;  // by rank
  const std::shared_ptr<WaitTimes> times_;
  const Callbacks callbacks_;
  std::vector<Entry> entries_;
};

}  // namespace torchft_ext
