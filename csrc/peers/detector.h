// Decides who is dead. Knows incarnations, watches and times; no sockets, no clock, no thread of
// its own.
//
// Owner: PeerMonitor. Threads: the monitor's loop only. Orders are given from inside its methods;
// they must not call back into the detector. Every method takes the time, so tests can play any
// schedule.
//
// Per peer that some watch counts on, and for each of its lines (main, and witness for ring
// neighbours):
//   absent   looked at now and then (0.2 s, 0.4 s ... 5 s after it was wanted) by a probe:
//              kGone -> dead; kUnreachable -> dead; kSilent -> frozen (never with heartbeats off);
//              kAlive -> wait on
//   up       main line only: nothing heard for the limit -> frozen
//   doubted  the line ended without a word, a probe is under way:
//              as above, but kAlive, or a new line -> link lost
// Verdicts: dead and frozen fail every watch with the peer (kPeerLost), lost links too (kLinkLost).
// A failed watch wants nothing any more. An accusation by the peer fails them with this process as
// the culprit. A peer that leaves is dropped from its watches without a word.
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
#include <vector>

#include "base/deadline.h"
#include "base/identity.h"
#include "peers/line_kind.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

using WatchId = uint64_t;

struct WatchedPeer {
  int rank = -1;
  Incarnation incarnation;
  std::string host;
  int64_t pid = -1;
  bool witness = false;  // a ring neighbour: its witness line is wanted too
};

class DetectorOrders {
 public:
  virtual ~DetectorOrders() = default;
  virtual void fail(WatchId watch, Failure failure) = 0;  // at most once for a watch
  virtual void wantLine(WatchId watch, const Incarnation& peer, LineKind kind) = 0;
  virtual void unwantLine(WatchId watch, const Incarnation& peer, LineKind kind) = 0;
  virtual void probe(const Incarnation& peer, LineKind kind, const ProbePatience& patience) = 0;
  virtual void accuse(const Incarnation& peer, const std::string& why) = 0;
  virtual void warn(const std::string& line) = 0;
  // "state T: stopped by a signal", or empty.
  virtual std::string processState(const std::string& host, int64_t pid) = 0;
};

struct DetectorCounts {
  int watches = 0;
  uint64_t deaths = 0;
  uint64_t freezes = 0;
  uint64_t lost_links = 0;
};

class Detector {
 public:
  using Time = Clock::time_point;
  static constexpr std::chrono::seconds kTombstoneFor{60};

  Detector(DetectorOrders& orders, Duration heartbeat_limit, std::string host, int64_t pid);

  void addWatch(Time now, WatchId id, int self_rank, const std::vector<WatchedPeer>& peers);
  void removeWatch(WatchId id);
  void peerLeft(WatchId id, int rank);

  void lineUp(Time now, const Incarnation& peer, LineKind kind);
  void heard(Time now, const Incarnation& peer);
  void lineEnded(Time now, const Incarnation& peer, LineKind kind, LineEnd end);
  void probed(Time now, const Incarnation& peer, LineKind kind, ProbeEnd end);

  void tick(Time now);
  // When tick() is to be called next; nullopt while nothing is watched.
  std::optional<Time> nextDue(Time now);

  DetectorCounts counts() const;
  size_t watchedPeers() const { return peers_.size(); }
  size_t tombstones() const { return tombstones_.size(); }

 private:
  enum class LineState { kAbsent, kUp, kDoubted };
  struct LineView {
    bool wanted = false;
    LineState state = LineState::kAbsent;
    bool probing = false;
    Time probe_began;
    Time next_check;
    Duration pause{};
  };
  struct Peer {
    std::string host;
    int64_t pid = -1;
    std::map<WatchId, int> watches;  // that count on it, with its rank there
    std::array<LineView, 2> lines;
    Time last_heard;
    bool warned = false;
  };
  struct Watch {
    int self_rank = -1;
    bool failed = false;
    std::map<Incarnation, WatchedPeer> peers;  // still counted on
  };
  struct Tombstone {
    Time until;
    bool ended = false;  // false: frozen or unreachable, it may come back
    std::string how;
  };

  static LineView& view(Peer& peer, LineKind kind);
  void attach(Time now, WatchId id, const WatchedPeer& watched);
  void detach(WatchId id, const Incarnation& peer);
  void failWatch(WatchId id, Failure failure);
  void declareDead(Time now, const Incarnation& id, bool ended, const std::string& how);
  void declareFrozen(Time now, const Incarnation& id, Duration silence);
  void declareCut(const Incarnation& id);
  void acceptAccusation(const Incarnation& id);
  void dropLeaver(const Incarnation& id);
  void failAllWith(const Incarnation& id,
                   const std::function<Failure(const Watch&, const WatchedPeer&)>& failure);
  void judgeProbe(Time now, const Incarnation& id, LineView& line, ProbeEnd end);
  void startProbe(Time now, const Incarnation& id, LineKind kind, LineView& line);
  void check(Time now, const Incarnation& id);
  void judgeSilence(Time now, const Incarnation& id);
  void creditLateness(Time now);
  void dropOldTombstones(Time now);
  Duration beatCheckPause() const;

  DetectorOrders& orders_;
  const Duration limit_;
  const std::string host_;
  const int64_t pid_;
  std::map<WatchId, Watch> watches_;
  std::map<Incarnation, Peer> peers_;
  std::map<Incarnation, Tombstone> tombstones_;
  std::optional<Time> due_;  // what nextDue() said last
  DetectorCounts counts_;
};

}  // namespace torchft_ext
