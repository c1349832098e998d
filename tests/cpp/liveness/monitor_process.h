// A process of a simulated world (monitor_world.h): its failure propagation, and what LivenessTable
// does for it.
//
// Owner: MonitorWorld. Not thread-safe.
#pragma once

#include "cpp/liveness/monitor_world.h"

namespace torchft_ext {

inline constexpr milliseconds kProbeLook{5};  // between two looks of a probe
inline constexpr int kBeatsPerLimit = 5;

// One direction of a connection. Whoever holds the pointer can tell whether it is still the same
// connection.
struct MonitorWorld::Channel {
  bool lost = false;  // nothing on its way arrives any more
  Time last;          // arrivals keep their order
};

class MonitorWorld::Process : private PropagationOrders {
 public:
  enum class State { kRuns, kFrozen, kEnded };

  Process(MonitorWorld& world, int number, const Incarnation& incarnation)
      : world_(world),
        number_(number),
        incarnation_(incarnation),
        propagation_(*this, world.options_.heartbeat_limit,
                     {incarnation, "host" + std::to_string(number), number}) {}

  State state() const { return state_; }
  const Incarnation& incarnation() const { return incarnation_; }
  FailurePropagation& propagation() { return propagation_; }
  const FailurePropagation& propagation() const { return propagation_; }
  bool expects(const Nonce& nonce) const { return expected_.count(nonce) > 0; }
  int mainConnections() const { return static_cast<int>(ends_[0].size()); }
  bool takesPart(int generation) const {
    return watches_.count(static_cast<WatchId>(generation)) > 0;
  }

  void beginGeneration(int generation);
  void removeWatch(int generation);
  void exit();
  void end();
  void freeze() { state_ = State::kFrozen; }
  void thaw();
  void cut(int peer, LivenessKind kind);
  // Whatever reaches the process; a frozen one comes to it when it thaws.
  void receive(Event event);

 private:
  struct Ends {  // this process's end of a connection
    std::shared_ptr<Channel> in;
    std::shared_ptr<Channel> out;
  };
  using Wishes = std::map<int, std::set<WatchId>>;  // by peer

  void fail(WatchId watch, Failure failure) override;
  bool send(const Incarnation& to, const Notice& notice) override;
  void retire(WatchId watch) override;
  void wantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) override;
  void unwantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) override;
  void probe(const Incarnation& peer, LivenessKind kind, const ProbeOrder& order) override;
  void accuse(const Incarnation& peer, const std::string& why) override;
  void warn(const std::string&) override {}
  std::string processState(const std::string&, int64_t) override { return ""; }

  static constexpr size_t indexOf(LivenessKind kind) { return kind == LivenessKind::kMain ? 0 : 1; }
  Ends* endsOf(int peer, LivenessKind kind) {
    const auto found = ends_[indexOf(kind)].find(peer);
    return found == ends_[indexOf(kind)].end() ? nullptr : &found->second;
  }
  void act(const std::function<void(FailurePropagation&)>& call);
  void arm();
  void transmit(const std::shared_ptr<Channel>& channel, int to, Event event) {
    transmitAfter(world_.delay(), channel, to, std::move(event));
  }
  void transmitAfter(Duration delay, const std::shared_ptr<Channel>& channel, int to, Event event);
  void dial(int peer, LivenessKind kind);
  void connect(int peer, LivenessKind kind);
  void stand(int peer, LivenessKind kind, Ends ends);
  void connectionEnded(int peer, LivenessKind kind, const std::shared_ptr<Channel>& in,
                       LivenessEnd end);
  void closeWith(int peer, LivenessKind kind, LivenessEnd last_word);
  void look(int peer, LivenessKind kind, Time began, ProbeOrder order);
  void finishProbe(int peer, LivenessKind kind, uint64_t number, Liveness answer);
  void beat();
  Event beatAt(Process& other);
  void confirmAll();

  MonitorWorld& world_;
  const int number_;
  const Incarnation incarnation_;
  FailurePropagation propagation_;
  State state_ = State::kRuns;
  std::deque<Event> deferred_;
  std::set<WatchId> watches_;
  std::set<Nonce> expected_;
  std::array<Wishes, 2> wishes_;
  std::array<std::map<int, Ends>, 2> ends_;
  std::array<std::map<int, Ends>, 2> unconfirmed_;  // stand at the other end already
  std::set<std::pair<int, LivenessKind>> dialling_;
  std::map<std::pair<int, LivenessKind>, uint64_t> probes_;
  std::map<std::pair<int, LivenessKind>, uint64_t> grace_;
  std::set<std::shared_ptr<Channel>> closing_;  // said goodbye to, read from still
  uint64_t next_number_ = 1;
  uint64_t alarm_ = 0;
  bool beating_ = false;
};

}  // namespace torchft_ext
