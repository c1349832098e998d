// Decides who is dead. Knows incarnations, watches and times; no sockets, no clock, no thread of
// its own.
//
// Owner: FailurePropagation. Threads: the monitor's loop only. Orders are given from inside its
// methods; they must not call back into the detector, but for what is const. Every method takes the
// time, so tests can play any schedule.
//
// A watch counts on all members of its generation, and wants connections to the few that are its
// neighbours (liveness/overlay.h): main connections along the overlay, backup connections along the
// ring. A member that leaves is counted on no more; kRewireAfter later the overlay of those that
// remain is taken up, so that members which all leave together cost nobody a new connection.
//
// Per neighbour, and for each of its connections:
//   absent   looked at now and then (0.2 s, 0.4 s ... 5 s after it was wanted) by a probe:
//              kGone -> dead; where it has never stood 0.5 s later, unless the peer's goodbye is
//              read meanwhile; kUnreachable -> dead; kSilent -> frozen (never with heartbeats
//              off); kAlive -> wait on; main connection only: after kLooksForAConnection looks ->
//              connection lost; kUnknown -> asked again
//   up       main connection only: nothing heard for the limit -> frozen
//   doubted  the connection ended without a word, a probe is under way:
//              as above, but kAlive, or a new connection -> connection lost
// Where a backup connection's probe has no answer while the main connection beats, the main
// connection counts, and the probe is repeated.
// So a connection that is wanted and not up ends in a verdict within a bounded time, whatever the
// cause: where heartbeats are on, no member waits for ever for a neighbour
// (liveness/failure_propagation.h builds on it). Before a process is called frozen or unreachable
// the others are asked for it (askOthers()), at half the limit, or after a quarter of the time that
// a probe has to connect: who has been reached over another way since has lost its connection to
// this process, not its life. A verdict waits for no answer: none means that nobody reaches it.
// Verdicts: dead and frozen fail every watch that counts on the peer (kPeerLost), lost connections
// those that want the connection (kConnectionLost). A failed watch wants nothing any more. An
// accusation by the peer fails the watches that count on it, with this process as the culprit.
//
// A dead process stays dead: a watch with it fails at once (for kTombstoneFor, then the probe says
// it again). A frozen or unreachable one may come back and join anew: a watch with it begins with a
// probe.
//
// Silence is measured in time during which this process ran: a tick that comes late credits the
// peers with the lateness, and after a long stop with half a limit at least, so that a thawed
// process does not accuse everyone.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/identity.h"
#include "liveness/liveness_kind.h"
#include "net/liveness.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

using WatchId = uint64_t;

struct WatchedPeer {
  int rank = -1;
  Incarnation incarnation;
  std::string host;
  int64_t pid = -1;
  bool backup = false;  // it takes backup connections
};

// What a decision may ask of the world.
class LivenessOrders {
 public:
  virtual ~LivenessOrders() = default;
  virtual void wantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) = 0;
  virtual void unwantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) = 0;
  virtual void probe(const Incarnation& peer, LivenessKind kind, const ProbeOrder& order) = 0;
  virtual void accuse(const Incarnation& peer, const std::string& why) = 0;
  virtual void warn(const std::string& text) = 0;
  // "state T: stopped by a signal", or empty.
  virtual std::string processState(const std::string& host, int64_t pid) = 0;
};

class DetectorOrders : public LivenessOrders {
 public:
  // At most once for a watch, which still has its members then.
  virtual void fail(WatchId watch, Failure failure) = 0;
  virtual void left(WatchId watch, const Incarnation& peer, int rank) = 0;
  // Whoever has a connection to that process is to find out whether it lives; see seenElsewhere().
  virtual void askOthers(const Incarnation& peer) = 0;
};

struct DetectorCounts {
  int watches = 0;
  uint64_t deaths = 0;
  uint64_t freezes = 0;
  uint64_t lost_connections = 0;
};

class Detector {
 public:
  using Time = Clock::time_point;
  static constexpr std::chrono::seconds kTombstoneFor{60};
  static constexpr std::chrono::seconds kRewireAfter{1};
  static constexpr int kLooksForAConnection = 12;  // some 36 s

  Detector(DetectorOrders& orders, Duration heartbeat_limit, std::string host, int64_t pid);

  void addWatch(Time now, WatchId id, int self_rank, const std::vector<WatchedPeer>& peers);
  void removeWatch(WatchId id);
  void peerLeft(Time now, WatchId id, int rank);
  // For a reason from elsewhere. False: it had failed before, or is unknown.
  bool failWatch(WatchId id, Failure failure);
  // Somebody found that this process has ended.
  void hearOfDeath(Time now, const Incarnation& peer);

  void connectionUp(Time now, const Incarnation& peer, LivenessKind kind);
  void heard(Time now, const Incarnation& peer);
  void connectionEnded(Time now, const Incarnation& peer, LivenessKind kind, LivenessEnd end);
  // It has answered another process since the others were asked last.
  void seenElsewhere(const Incarnation& peer);
  // The answer to the probe of that number. 0: a dial found it unasked.
  void probed(Time now, const Incarnation& peer, LivenessKind kind, Liveness answer,
              uint64_t number);

  void tick(Time now);
  // When tick() is to be called next; nullopt while nothing is watched.
  std::optional<Time> nextDue(Time now);

  // That are counted on, with their ranks.
  std::vector<std::pair<int, Incarnation>> membersOf(WatchId id) const;
  bool countsOn(WatchId id, const Incarnation& peer) const;
  bool isNeighbour(WatchId id, const Incarnation& peer) const;  // its main connection is wanted
  std::optional<Incarnation> memberAt(WatchId id, int rank) const;
  bool hasEnded(const Incarnation& peer) const;
  bool knows(const Incarnation& peer) const { return neighbours_.count(peer) > 0; }

  DetectorCounts counts() const;
  size_t neighbours() const { return neighbours_.size(); }
  size_t tombstones() const { return tombstones_.size(); }

 private:
  enum class ConnectionState { kAbsent, kUp, kDoubted };
  struct ConnectionView {
    int wanted = 0;  // by so many watches
    ConnectionState state = ConnectionState::kAbsent;
    bool stood = false;         // at any time
    std::optional<Time> ended;  // the process, as a probe found before the connection stood
    uint64_t probe = 0;         // the number of the one under way; 0: none
    int looks = 0;              // that found it alive, without a connection
    Time probe_began;
    Time doubted;
    Time next_check;
    Duration pause{};
  };
  // A process to which some watch wants a connection.
  struct Neighbour {
    WatchedPeer who;  // its rank in one of the generations, for warnings
    std::array<ConnectionView, 2> connections;
    Time last_heard;  // or asked, while no main connection is up
    bool warned = false;
    bool asked = false;  // the others, since it was heard of last
    bool seen = false;   // by them
  };
  struct Member {
    WatchedPeer who;
    std::array<bool, 2> wanted{};  // connections, by kind
  };
  struct WatchState {
    int self_rank = -1;
    bool failed = false;
    std::map<Incarnation, Member> members;  // still counted on
    std::optional<Time> rewire_at;
  };
  struct Tombstone {
    Time until;
    bool ended = false;  // false: frozen or unreachable, it may come back
    std::string how;
  };
  using Describe = std::function<Failure(const WatchState&, const WatchedPeer&)>;

  ConnectionView* viewOf(const Incarnation& id, LivenessKind kind);
  const Member* findMember(WatchId id, const Incarnation& peer) const;
  void rewire(Time now, WatchId id, WatchState& watch);
  void setWanted(Time now, WatchId id, Member& member, LivenessKind kind, bool wanted);
  void want(Time now, WatchId id, const WatchedPeer& peer, LivenessKind kind);
  void unwant(WatchId id, const Incarnation& peer, LivenessKind kind);
  void dropMembers(WatchId id, WatchState& watch);
  void dropMember(Time now, WatchId id, WatchState& watch, const Incarnation& peer);
  void declareDead(Time now, const Incarnation& id, bool ended, const std::string& how,
                   Duration silent_for);
  void declareFrozen(Time now, const Incarnation& id, Duration silence);
  void declareCut(const Incarnation& id, const std::string& how);
  void acceptAccusation(const Incarnation& id);
  void dropLeaver(Time now, const Incarnation& id);
  void failAllWith(const Incarnation& id, const Describe& describe);
  void judgeProbe(Time now, const Incarnation& id, LivenessKind kind, ConnectionView& connection,
                  Liveness answer);
  static bool mayHaveSaidGoodbye(Time now, ConnectionView& connection);
  void judgeAlive(const Incarnation& id, LivenessKind kind, ConnectionView& connection);
  void startProbe(Time now, const Incarnation& id, LivenessKind kind, ConnectionView& connection);
  void check(Time now, const Incarnation& id);
  Duration connectWithin() const;
  std::optional<Time> whenToAsk(const Neighbour& peer) const;
  void askIfDue(Time now, const Incarnation& id);
  bool beatsMeanwhile(const Incarnation& id, const ConnectionView& connection) const;
  void judgeSilence(Time now, const Incarnation& id);
  bool isSilenceCounted(const Neighbour& peer) const;
  void creditLateness(Time now);
  void dropOldTombstones(Time now);
  Duration beatCheckPause() const;

  DetectorOrders& orders_;
  const Duration limit_;
  const std::string host_;
  const int64_t pid_;
  std::map<WatchId, WatchState> watches_;
  std::map<Incarnation, Neighbour> neighbours_;
  std::map<Incarnation, Tombstone> tombstones_;
  uint64_t last_probe_ = 0;
  std::optional<Time> due_;  // what nextDue() said last
  DetectorCounts counts_;
};

}  // namespace torchft_ext
