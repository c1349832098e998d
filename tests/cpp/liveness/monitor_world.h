// A world of processes that watch each other, in simulated time: the real FailurePropagation of
// each, over a network in memory that delays, loses and cuts. What each is told is compared with
// what happened.
//
// The network keeps to what LivenessTable and TCP promise: the greater incarnation connects where
// it wants the connection and the other end expects the generation; bytes arrive in order or not at
// all; the end of a process ends its connections; whoever is frozen neither sends nor hears, until
// it thaws. What is lost and sent again holds up whatever follows it on its connection, as with
// TCP.
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

#include "liveness/failure_propagation.h"

namespace torchft_ext {

struct WorldOptions {
  int processes = 4;
  Duration heartbeat_limit{0};
  Duration shortest_delay = milliseconds(1);  // of anything that travels
  Duration longest_delay = milliseconds(1);
  uint32_t lost_per_mille = 0;  // of all that travels: comes so much later, since it is sent again
  Duration resent_after{0};
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
  int beginGeneration(const std::vector<int>& members, Duration spread = Duration::zero());
  void abort(int generation, int member);
  void leaveGeneration(int generation, int member);
  void exit(int process);  // cleanly
  void kill(int process);
  void freeze(int process);
  void thaw(int process);
  void cutConnection(int a, int b);  // what is on its way is lost; it can be made anew
  void blockPair(int a, int b);
  void unblockPair(int a, int b);
  void mutePair(int a, int b);  // for good: nothing arrives, and no connection ends

  // What is known.
  bool runs(int process) const;
  bool frozen(int process) const;
  int connections(int process) const;  // main ones, standing
  uint64_t noticesSent() const;
  const std::vector<int>& membersOf(int generation) const;
  const Failure* toldOf(int generation, int member) const;  // null: nothing yet
  // Over so many connections the news came to it. 0: it found out itself.
  std::optional<int> hopsTo(int generation, int member) const;
  std::vector<int> survivorsOf(int generation) const;  // take part in it still
  // Broken, or a survivor holds it for broken.
  bool isBroken(int generation) const;
  // The survivors of broken generations who do not know: empty, sooner or later.
  std::vector<Pair> blocked() const;           // (generation, member)
  uint64_t digest() const { return digest_; }  // of all that was told, in order
  size_t generationsKept(int process) const;

 private:
  class Process;
  struct Channel;  // a connection
  struct Generation {
    Nonce nonce;
    std::vector<int> members;
    std::set<int> aborters;
    bool broken = false;
  };
  struct Told {
    Failure failure;
    int hops = 0;
  };
  struct Span {
    Time from;
    Time to = Time::max();  // lasts
  };
  using Spans = std::vector<Span>;

  Process& at(int process) { return *processes_[static_cast<size_t>(process)]; }
  const Process& at(int process) const { return *processes_[static_cast<size_t>(process)]; }
  Duration delay();
  static Pair pairOf(int a, int b) { return {std::min(a, b), std::max(a, b)}; }
  bool isBlocked(int a, int b) const;
  bool isMuted(int a, int b) const { return muted_.count(pairOf(a, b)) > 0; }
  int processOf(const Incarnation& id) const { return numbers_.at(id); }
  void breakGenerationsWith(int process);
  int generationOf(const Nonce& nonce) const;
  void judge(int generation, int member, const Failure& failure);
  void addToDigest(int generation, int member, const Failure& failure);
  bool isTrue(const Generation& generation, const Failure& failure) const;
  bool wasOutOfReach(const Generation& generation, int process) const;
  bool wasHeardLate(const Generation& generation, int process) const;
  Duration longestOf(Spans spans) const;

  const WorldOptions options_;
  std::mt19937 random_;
  Time now_{std::chrono::seconds(1000)};
  std::multimap<Time, Event> events_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::map<Incarnation, int> numbers_;
  std::vector<Generation> generations_;
  std::map<Pair, Told> told_;  // by generation and member
  uint64_t digest_ = 0;
  int hops_heard_ = 0;  // of the notice that is being delivered
  std::map<Pair, Spans> blocked_;
  std::map<int, Spans> frozen_;
  std::set<Pair> ever_cut_;
  std::set<Pair> muted_;
  std::set<int> ever_killed_;
  std::set<int> ever_exited_;  // before anyone could be told that it left, this looks like a death
};

}  // namespace torchft_ext
