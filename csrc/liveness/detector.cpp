#include "liveness/detector.h"

#include <algorithm>
#include <utility>

#include "liveness/overlay.h"

namespace torchft_ext {
namespace {

using std::chrono::seconds;

constexpr milliseconds kFirstCheck{200};
constexpr seconds kLongestCheck{5};
// From the end of a process until its goodbye has been read.
constexpr milliseconds kGoodbyeMayTake{500};
constexpr seconds kLongestConnect{2};
constexpr seconds kWarnAfter{1};
constexpr milliseconds kShortestTick{10};
constexpr int kTicksPerLimit = 10;
// When the others are asked: that part of the limit of silence, or of the time for a connection, is
// over. The rest is theirs; they need two ways there and back.
constexpr int kAskAtLimitPart = 2;
constexpr int kAskAtConnectPart = 4;

constexpr std::array<LivenessKind, 2> kLivenessKinds{LivenessKind::kMain, LivenessKind::kBackup};

constexpr size_t indexOf(LivenessKind kind) {
  return kind == LivenessKind::kMain ? 0 : 1;
}

bool contains(const std::vector<int>& ascending, int value) {
  return std::binary_search(ascending.begin(), ascending.end(), value);
}

constexpr const char* kProcessEnded = "its process ended";
constexpr const char* kConnectionCut = "its connection was cut";
constexpr const char* kNothingComes = "nothing comes through from the far end any more";
constexpr const char* kNeverConnected = "no liveness connection could be made";

Cause causeBy(const WatchedPeer& peer, const std::string& how) {
  Cause cause;
  cause.rank = peer.rank;
  cause.host = peer.host;
  cause.pid = peer.pid;
  cause.how = how;
  return cause;
}

Failure peerLost(const WatchedPeer& peer, const std::string& how,
                 Duration silent_for = Duration::zero()) {
  Failure failure;
  failure.kind = FailureKind::kPeerLost;
  failure.cause = causeBy(peer, how);
  failure.silent_for = silent_for;
  return failure;
}

}  // namespace

Detector::Detector(DetectorOrders& orders, Duration heartbeat_limit, std::string host, int64_t pid)
    : orders_(orders), limit_(heartbeat_limit), host_(std::move(host)), pid_(pid) {}

Detector::ConnectionView* Detector::viewOf(const Incarnation& id, LivenessKind kind) {
  const auto found = neighbours_.find(id);
  return found == neighbours_.end() ? nullptr : &found->second.connections[indexOf(kind)];
}

// Watches.

void Detector::addWatch(Time now, WatchId id, int self_rank,
                        const std::vector<WatchedPeer>& peers) {
  dropOldTombstones(now);
  WatchState& watch = watches_[id];
  watch.self_rank = self_rank;
  for (const WatchedPeer& peer : peers) watch.members[peer.incarnation].who = peer;
  rewire(now, id, watch);
  for (const WatchedPeer& peer : peers) {
    const auto tombstone = tombstones_.find(peer.incarnation);
    if (tombstone == tombstones_.end() || !tombstone->second.ended) continue;
    failWatch(id, peerLost(peer, tombstone->second.how));
    return;
  }
}

void Detector::rewire(Time now, WatchId id, WatchState& watch) {
  watch.rewire_at.reset();
  std::vector<int> ranks{watch.self_rank};
  for (const auto& [incarnation, member] : watch.members) ranks.push_back(member.who.rank);
  std::sort(ranks.begin(), ranks.end());
  const std::vector<int> neighbours = overlayNeighbours(watch.self_rank, ranks);
  const std::vector<int> ring = ringNeighbours(watch.self_rank, ranks);
  for (auto& [incarnation, member] : watch.members) {
    setWanted(now, id, member, LivenessKind::kMain, contains(neighbours, member.who.rank));
    setWanted(now, id, member, LivenessKind::kBackup,
              member.who.backup && contains(ring, member.who.rank));
  }
}

void Detector::setWanted(Time now, WatchId id, Member& member, LivenessKind kind, bool wanted) {
  if (std::exchange(member.wanted[indexOf(kind)], wanted) == wanted) return;
  if (wanted) {
    want(now, id, member.who, kind);
  } else {
    unwant(id, member.who.incarnation, kind);
  }
}

void Detector::want(Time now, WatchId id, const WatchedPeer& peer, LivenessKind kind) {
  Neighbour& neighbour = neighbours_[peer.incarnation];
  neighbour.who = peer;
  ConnectionView& connection = neighbour.connections[indexOf(kind)];
  if (connection.wanted++ == 0) {
    connection.pause = kFirstCheck;
    connection.next_check = tombstones_.count(peer.incarnation) > 0 ? now : now + kFirstCheck;
  }
  connection.looks = 0;
  orders_.wantConnection(id, peer.incarnation, kind);
}

void Detector::unwant(WatchId id, const Incarnation& peer, LivenessKind kind) {
  const auto found = neighbours_.find(peer);
  ConnectionView& connection = found->second.connections[indexOf(kind)];
  if (--connection.wanted == 0) connection = ConnectionView{};
  const auto& connections = found->second.connections;
  if (connections[0].wanted == 0 && connections[1].wanted == 0) neighbours_.erase(found);
  orders_.unwantConnection(id, peer, kind);
}

void Detector::dropMembers(WatchId id, WatchState& watch) {
  for (auto& [incarnation, member] : watch.members) {
    for (const LivenessKind kind : kLivenessKinds) setWanted({}, id, member, kind, false);
  }
  watch.members.clear();
  watch.rewire_at.reset();
}

void Detector::dropMember(Time now, WatchId id, WatchState& watch, const Incarnation& peer) {
  const auto found = watch.members.find(peer);
  if (found == watch.members.end()) return;
  const int rank = found->second.who.rank;
  for (const LivenessKind kind : kLivenessKinds) setWanted(now, id, found->second, kind, false);
  watch.members.erase(found);
  if (!watch.rewire_at) watch.rewire_at = now + kRewireAfter;
  orders_.left(id, peer, rank);
}

void Detector::removeWatch(WatchId id) {
  const auto found = watches_.find(id);
  if (found == watches_.end()) return;
  dropMembers(id, found->second);
  watches_.erase(found);
}

void Detector::peerLeft(Time now, WatchId id, int rank) {
  const std::optional<Incarnation> leaver = memberAt(id, rank);
  if (leaver) dropMember(now, id, watches_.at(id), *leaver);
}

bool Detector::failWatch(WatchId id, Failure failure) {
  const auto found = watches_.find(id);
  if (found == watches_.end() || std::exchange(found->second.failed, true)) return false;
  orders_.fail(id, std::move(failure));
  dropMembers(id, found->second);
  return true;
}

void Detector::failAllWith(const Incarnation& id, const Describe& describe) {
  for (auto& [watch_id, watch] : watches_) {
    const auto member = watch.members.find(id);
    if (member != watch.members.end()) failWatch(watch_id, describe(watch, member->second.who));
  }
}

const Detector::Member* Detector::findMember(WatchId id, const Incarnation& peer) const {
  const auto watch = watches_.find(id);
  if (watch == watches_.end()) return nullptr;
  const auto member = watch->second.members.find(peer);
  return member == watch->second.members.end() ? nullptr : &member->second;
}

std::vector<std::pair<int, Incarnation>> Detector::membersOf(WatchId id) const {
  std::vector<std::pair<int, Incarnation>> found;
  const auto watch = watches_.find(id);
  if (watch == watches_.end()) return found;
  found.reserve(watch->second.members.size());
  for (const auto& [incarnation, member] : watch->second.members) {
    found.emplace_back(member.who.rank, incarnation);
  }
  return found;
}

bool Detector::countsOn(WatchId id, const Incarnation& peer) const {
  return findMember(id, peer) != nullptr;
}

bool Detector::isNeighbour(WatchId id, const Incarnation& peer) const {
  const Member* member = findMember(id, peer);
  return member != nullptr && member->wanted[indexOf(LivenessKind::kMain)];
}

std::optional<Incarnation> Detector::memberAt(WatchId id, int rank) const {
  const auto watch = watches_.find(id);
  if (watch == watches_.end()) return std::nullopt;
  for (const auto& [incarnation, member] : watch->second.members) {
    if (member.who.rank == rank) return incarnation;
  }
  return std::nullopt;
}

bool Detector::hasEnded(const Incarnation& peer) const {
  const auto tombstone = tombstones_.find(peer);
  return tombstone != tombstones_.end() && tombstone->second.ended;
}

// What happens to connections.

void Detector::connectionUp(Time now, const Incarnation& id, LivenessKind kind) {
  ConnectionView* connection = viewOf(id, kind);
  if (connection == nullptr || connection->wanted == 0) return;
  tombstones_.erase(id);
  const bool was_cut = connection->state == ConnectionState::kDoubted;
  connection->state = ConnectionState::kUp;
  connection->stood = true;
  connection->ended.reset();
  connection->pause = kFirstCheck;
  connection->looks = 0;
  if (kind == LivenessKind::kMain) heard(now, id);
  if (was_cut) declareCut(id, kConnectionCut);
}

void Detector::heard(Time now, const Incarnation& id) {
  const auto found = neighbours_.find(id);
  if (found == neighbours_.end()) return;
  Neighbour& peer = found->second;
  peer.last_heard = now;
  peer.warned = peer.asked = peer.seen = false;
}

void Detector::seenElsewhere(const Incarnation& id) {
  const auto found = neighbours_.find(id);
  if (found != neighbours_.end()) found->second.seen = found->second.asked;
}

void Detector::connectionEnded(Time now, const Incarnation& id, LivenessKind kind,
                               LivenessEnd end) {
  if (end == LivenessEnd::kLeft) return dropLeaver(now, id);
  ConnectionView* connection = viewOf(id, kind);
  // News of a connection that stood for watches of the past: it may come late, from the other loop.
  if (connection == nullptr || connection->state != ConnectionState::kUp) return;
  if (end == LivenessEnd::kAccused) return acceptAccusation(id);
  if (end == LivenessEnd::kIdle) {
    connection->state = ConnectionState::kAbsent;
    connection->pause = kFirstCheck;
    connection->next_check = now + kFirstCheck;
  } else {
    connection->state = ConnectionState::kDoubted;
    connection->doubted = now;
    startProbe(now, id, kind, *connection);
  }
}

void Detector::probed(Time now, const Incarnation& id, LivenessKind kind, Liveness answer,
                      uint64_t number) {
  ConnectionView* connection = viewOf(id, kind);
  if (connection == nullptr || connection->wanted == 0) return;
  // An answer to an earlier watch's question says what was. That a process is gone stays true.
  const bool asked = number != 0 && number == connection->probe;
  if (!asked && answer != Liveness::kGone) return;
  connection->probe = 0;
  // An answer from before the connection ended does not say why it did.
  const bool stale = connection->state == ConnectionState::kDoubted &&
                     connection->probe_began < connection->doubted;
  if (stale && answer == Liveness::kAlive) return startProbe(now, id, kind, *connection);
  if (answer == Liveness::kUnknown) {  // says nothing of the peer: no look at it
    if (connection->state != ConnectionState::kUp) startProbe(now, id, kind, *connection);
    return;
  }
  connection->next_check = now + connection->pause;
  connection->pause = std::min<Duration>(connection->pause * 2, kLongestCheck);
  judgeProbe(now, id, kind, *connection, answer);
}

void Detector::judgeProbe(Time now, const Incarnation& id, LivenessKind kind,
                          ConnectionView& connection, Liveness answer) {
  // A connection that came up meanwhile says more than the probe: should the process end, so will
  // the connection.
  if (connection.state == ConnectionState::kUp && answer != Liveness::kAlive) return;
  const bool no_answer = answer == Liveness::kUnreachable || answer == Liveness::kSilent;
  if (no_answer && beatsMeanwhile(id, connection)) {
    if (connection.state == ConnectionState::kDoubted) startProbe(now, id, kind, connection);
    return;
  }
  switch (answer) {
    case Liveness::kGone:
      if (mayHaveSaidGoodbye(now, connection)) return;
      return declareDead(now, id, true, kProcessEnded, now - connection.probe_began);
    case Liveness::kUnreachable:
      if (neighbours_.at(id).seen) return declareCut(id, kNothingComes);
      return declareDead(now, id, false, "its host cannot be reached",
                         now - connection.probe_began);
    case Liveness::kSilent:
      if (limit_ > Duration::zero()) declareFrozen(now, id, now - connection.probe_began);
      return;
    case Liveness::kAlive:
      return judgeAlive(id, kind, connection);
    case Liveness::kUnknown:
      return;
  }
}

// A process that ends before its connection stood has said no goodbye on that. It may have said one
// on the connections of the generation, which another thread reads; peerLeft() comes then. Where
// there is none, that thread finds the death too, by their end.
bool Detector::mayHaveSaidGoodbye(Time now, ConnectionView& connection) {
  if (connection.stood) return false;
  if (!connection.ended) connection.ended = now;
  const Time until = *connection.ended + kGoodbyeMayTake;
  connection.next_check = std::min(connection.next_check, until);
  return now < until;
}

void Detector::judgeAlive(const Incarnation& id, LivenessKind kind, ConnectionView& connection) {
  tombstones_.erase(id);
  Neighbour& peer = neighbours_.at(id);
  if (kind == LivenessKind::kMain) peer.asked = peer.seen = false;
  if (connection.state == ConnectionState::kDoubted) return declareCut(id, kConnectionCut);
  if (connection.state != ConnectionState::kAbsent || kind != LivenessKind::kMain) return;
  peer.warned = false;
  if (++connection.looks >= kLooksForAConnection) declareCut(id, kNeverConnected);
}

void Detector::startProbe(Time now, const Incarnation& id, LivenessKind kind,
                          ConnectionView& connection) {
  if (connection.probe != 0) return;
  connection.probe = ++last_probe_;
  connection.probe_began = now;
  if (kind == LivenessKind::kMain && connection.state == ConnectionState::kAbsent) {
    neighbours_.at(id).last_heard = now;
  }
  ProbeOrder order;
  order.number = connection.probe;
  order.connect = connectWithin();
  order.answer = limit_ > Duration::zero() ? limit_ : Duration(-1);
  orders_.probe(id, kind, order);
}

Duration Detector::connectWithin() const {
  return limit_ > Duration::zero() ? std::min<Duration>(limit_, kLongestConnect)
                                   : Duration(kLongestConnect);
}

// Verdicts.

void Detector::declareDead(Time now, const Incarnation& id, bool ended, const std::string& how,
                           Duration silent_for) {
  ++counts_.deaths;
  tombstones_[id] = Tombstone{now + kTombstoneFor, ended, how};
  failAllWith(id, [&](const WatchState&, const WatchedPeer& peer) {
    return peerLost(peer, how, silent_for);
  });
  if (!ended) orders_.accuse(id, how);
}

void Detector::hearOfDeath(Time now, const Incarnation& id) {
  if (!hasEnded(id)) declareDead(now, id, true, kProcessEnded, Duration::zero());
}

void Detector::declareFrozen(Time now, const Incarnation& id, Duration silence) {
  if (neighbours_.at(id).seen) return declareCut(id, kNothingComes);
  const WatchedPeer& peer = neighbours_.at(id).who;
  std::string how = "its process has not answered for " + formatSeconds(silence);
  const std::string state = orders_.processState(peer.host, peer.pid);
  if (!state.empty()) how += " (" + state + ")";
  ++counts_.freezes;
  tombstones_[id] = Tombstone{now + kTombstoneFor, false, how};
  failAllWith(
      id, [&](const WatchState&, const WatchedPeer& lost) { return peerLost(lost, how, silence); });
  // Last, since it closes the connection, over which the peer is told first which generations it is
  // out of.
  orders_.accuse(id, how);
}

// Of the generations with that process, those that do not need this connection are unharmed.
void Detector::declareCut(const Incarnation& id, const std::string& how) {
  ++counts_.lost_connections;
  for (auto& [watch_id, watch] : watches_) {
    const auto member = watch.members.find(id);
    if (member == watch.members.end()) continue;
    const Member& peer = member->second;
    if (!peer.wanted[0] && !peer.wanted[1]) continue;
    Failure failure;
    failure.kind = FailureKind::kConnectionLost;
    failure.cause.rank = watch.self_rank;
    failure.cause.other_rank = peer.who.rank;
    failure.cause.host = host_;
    failure.cause.pid = pid_;
    failure.cause.how = how + ", while the process at the far end (host " + peer.who.host +
                        ", pid " + std::to_string(peer.who.pid) + ") lives";
    failWatch(watch_id, std::move(failure));
  }
}

void Detector::acceptAccusation(const Incarnation& id) {
  failAllWith(id, [this](const WatchState& watch, const WatchedPeer& peer) {
    WatchedPeer self;
    self.rank = watch.self_rank;
    self.host = host_;
    self.pid = pid_;
    return peerLost(self, "this process was frozen and left out: rank " +
                              std::to_string(peer.rank) + " had not heard of it for too long");
  });
}

void Detector::dropLeaver(Time now, const Incarnation& id) {
  for (auto& [watch_id, watch] : watches_) dropMember(now, watch_id, watch, id);
}

// Time.

void Detector::tick(Time now) {
  creditLateness(now);
  for (auto& [id, watch] : watches_) {
    if (watch.rewire_at && *watch.rewire_at <= now) rewire(now, id, watch);
  }
  std::vector<Incarnation> ids;  // judging edits neighbours_
  ids.reserve(neighbours_.size());
  for (const auto& [id, neighbour] : neighbours_) ids.push_back(id);
  for (const Incarnation& id : ids) {
    check(now, id);
    askIfDue(now, id);
    judgeSilence(now, id);
  }
}

void Detector::creditLateness(Time now) {
  const Duration late = due_ ? now - *std::exchange(due_, std::nullopt) : Duration::zero();
  if (limit_ == Duration::zero() || late <= beatCheckPause()) return;
  for (auto& [id, peer] : neighbours_) {
    peer.last_heard = std::min(now, peer.last_heard + late);
    if (late > limit_ / 2) peer.last_heard = std::max(peer.last_heard, now - limit_ / 2);
  }
}

void Detector::check(Time now, const Incarnation& id) {
  for (const LivenessKind kind : kLivenessKinds) {
    ConnectionView* connection = viewOf(id, kind);
    if (connection == nullptr) return;
    if (connection->wanted > 0 && connection->state == ConnectionState::kAbsent &&
        connection->probe == 0 && connection->next_check <= now) {
      startProbe(now, id, kind, *connection);
    }
  }
}

std::optional<Detector::Time> Detector::whenToAsk(const Neighbour& peer) const {
  std::optional<Time> when;
  if (peer.asked) return when;
  const auto consider = [&when](Time each) { when = when ? std::min(*when, each) : each; };
  const bool up = peer.connections[indexOf(LivenessKind::kMain)].state == ConnectionState::kUp;
  if (up && limit_ > Duration::zero()) consider(peer.last_heard + limit_ / kAskAtLimitPart);
  for (const ConnectionView& connection : peer.connections) {
    if (!up && connection.probe != 0)
      consider(connection.probe_began + connectWithin() / kAskAtConnectPart);
  }
  return when;
}

// Of a backup connection that cannot be made, say because its port is filtered: the main connection
// says more, and should the process end or freeze, so will that.
bool Detector::beatsMeanwhile(const Incarnation& id, const ConnectionView& connection) const {
  const Neighbour& peer = neighbours_.at(id);
  const ConnectionView& main = peer.connections[indexOf(LivenessKind::kMain)];
  return &main != &connection && main.state == ConnectionState::kUp &&
         peer.last_heard > connection.probe_began && limit_ > Duration::zero();
}

void Detector::askIfDue(Time now, const Incarnation& id) {
  const auto found = neighbours_.find(id);
  if (found == neighbours_.end()) return;
  const std::optional<Time> when = whenToAsk(found->second);
  if (!when || *when > now) return;
  found->second.asked = true;
  orders_.askOthers(id);
}

void Detector::judgeSilence(Time now, const Incarnation& id) {
  const auto found = neighbours_.find(id);
  if (found == neighbours_.end() || !isSilenceCounted(found->second)) return;
  Neighbour& peer = found->second;
  const bool up = peer.connections[indexOf(LivenessKind::kMain)].state == ConnectionState::kUp;
  const Duration silence = now - peer.last_heard;
  if (up && silence >= limit_) return declareFrozen(now, id, silence);
  if (limit_ <= kWarnAfter || silence < kWarnAfter || std::exchange(peer.warned, true)) return;
  std::string text = "peer monitor: rank " + std::to_string(peer.who.rank) + " (host " +
                     peer.who.host + ", pid " + std::to_string(peer.who.pid) +
                     ") has not been heard of for " + formatSeconds(silence);
  text += up ? "; it counts as lost after " + formatSeconds(limit_)
             : ", and there is no liveness connection to it yet";
  orders_.warn(text);
}

// Where the main connection is not up yet, a probe asks, and says itself when its time is over.
bool Detector::isSilenceCounted(const Neighbour& peer) const {
  const ConnectionView& connection = peer.connections[indexOf(LivenessKind::kMain)];
  if (limit_ == Duration::zero()) return false;
  return connection.state == ConnectionState::kUp ||
         (connection.state == ConnectionState::kAbsent && connection.probe != 0);
}

// Often enough that this process's own stops show as lateness.
Duration Detector::beatCheckPause() const {
  return std::max<Duration>(limit_ / kTicksPerLimit, kShortestTick);
}

std::optional<Detector::Time> Detector::nextDue(Time now) {
  creditLateness(now);
  const auto consider = [this](Time when) { due_ = due_ ? std::min(*due_, when) : when; };
  for (const auto& [id, watch] : watches_) {
    if (watch.rewire_at) consider(*watch.rewire_at);
  }
  for (const auto& [id, peer] : neighbours_) {
    for (const ConnectionView& connection : peer.connections) {
      if (connection.wanted > 0 && connection.state == ConnectionState::kAbsent &&
          connection.probe == 0)
        consider(connection.next_check);
    }
    if (const std::optional<Time> when = whenToAsk(peer)) consider(*when);
    if (!isSilenceCounted(peer)) continue;
    consider(now + beatCheckPause());
    if (peer.connections[0].state == ConnectionState::kUp) consider(peer.last_heard + limit_);
  }
  if (due_) due_ = std::max(*due_, now);
  return due_;
}

void Detector::dropOldTombstones(Time now) {
  std::erase_if(tombstones_, [now](const auto& entry) { return entry.second.until <= now; });
}

DetectorCounts Detector::counts() const {
  DetectorCounts counts = counts_;
  counts.watches = static_cast<int>(watches_.size());
  return counts;
}

}  // namespace torchft_ext
