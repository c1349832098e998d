// A world of processes that watch each other, in simulated time: the real Sentry of each, over a
// network in memory that delays, loses and cuts. What each is told is compared with what happened.
//
// The network keeps to what LineTable and TCP promise: the greater incarnation connects where it
// wants the line and the other end expects the epoch; bytes arrive in order or not at all; the end
// of a process ends its lines; whoever is frozen neither sends nor hears, until it thaws.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "peers/sentry.h"

namespace torchft_ext {

struct WorldOptions {
  int processes = 4;
  Duration heartbeat_limit{0};
  Duration shortest_delay = milliseconds(1);  // of anything that travels
  Duration longest_delay = milliseconds(1);
  uint32_t seed = 1;
};

class MonitorWorld {
 public:
  using Time = Clock::time_point;
  using Event = std::function<void()>;
  using Pair = std::pair<int, int>;

  explicit MonitorWorld(const WorldOptions& options);
  ~MonitorWorld();

  Time now() const { return now_; }
  void pass(Duration time);
  void later(Duration delay, Event event) { events_.emplace(now_ + delay, std::move(event)); }
  uint32_t random(uint32_t below) { return random_() % below; }

  // What happens. Members in the order of their ranks; each begins at a time of its own, at most
  // `spread` from now.
  int beginEpoch(const std::vector<int>& members, Duration spread = Duration::zero());
  void abort(int epoch, int member);
  void leaveEpoch(int epoch, int member);
  void exit(int process);  // cleanly
  void kill(int process);
  void freeze(int process);
  void thaw(int process);
  void cutLine(int a, int b);  // what is on its way is lost; it can be made anew
  void blockPair(int a, int b);
  void unblockPair(int a, int b);

  // What is known.
  bool runs(int process) const;
  bool frozen(int process) const;
  int lines(int process) const;  // main ones, standing
  uint64_t noticesSent() const;
  const std::vector<int>& membersOf(int epoch) const;
  const Failure* toldOf(int epoch, int member) const;  // null: nothing yet
  std::optional<Time> toldAt(int epoch, int member) const;
  std::vector<int> survivorsOf(int epoch) const;  // take part in it still
  // Broken, or a survivor holds it for broken.
  bool isBroken(int epoch) const;
  // The survivors of broken epochs who do not know: empty, sooner or later.
  std::vector<Pair> blocked() const;  // (epoch, member)
  size_t epochsKept(int process) const;

 private:
  class Process;
  struct Channel;  // a line
  struct Epoch {
    Nonce nonce;
    std::vector<int> members;
    std::set<int> aborters;
    bool broken = false;
  };
  struct Told {
    Failure failure;
    Time when;
  };

  Process& at(int process) { return *processes_[static_cast<size_t>(process)]; }
  const Process& at(int process) const { return *processes_[static_cast<size_t>(process)]; }
  Duration delay();
  static Pair pairOf(int a, int b) { return {std::min(a, b), std::max(a, b)}; }
  bool isBlocked(int a, int b) const { return blocked_.count(pairOf(a, b)) > 0; }
  int processOf(const Incarnation& id) const { return numbers_.at(id); }
  void breakEpochsWith(int process);
  void judge(int epoch, int member, const Failure& failure);
  bool isTrue(const Epoch& epoch, const Failure& failure) const;

  const WorldOptions options_;
  std::mt19937 random_;
  Time now_{std::chrono::seconds(1000)};
  std::multimap<Time, Event> events_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::map<Incarnation, int> numbers_;
  std::vector<Epoch> epochs_;
  std::map<Pair, Told> told_;  // by epoch and member
  std::set<Pair> blocked_;
  std::set<Pair> ever_cut_;
  std::set<int> ever_frozen_;
  std::set<int> ever_killed_;
  std::set<int> ever_exited_;  // before anyone could be told that it left, this looks like a death
};

}  // namespace torchft_ext
