#include "peers/detector.h"

#include <algorithm>
#include <utility>

namespace torchft_ext {
namespace {

using std::chrono::seconds;

constexpr milliseconds kFirstCheck{200};
constexpr seconds kLongestCheck{5};
constexpr seconds kLongestConnect{2};
constexpr seconds kWarnAfter{1};
constexpr milliseconds kShortestTick{10};
constexpr int kTicksPerLimit = 10;

constexpr std::array<LineKind, 2> kLineKinds{LineKind::kMain, LineKind::kWitness};

Cause causeBy(const WatchedPeer& peer, const std::string& how) {
  Cause cause;
  cause.rank = peer.rank;
  cause.host = peer.host;
  cause.pid = peer.pid;
  cause.how = how;
  return cause;
}

Failure peerLost(const WatchedPeer& peer, const std::string& how) {
  Failure failure;
  failure.kind = FailureKind::kPeerLost;
  failure.cause = causeBy(peer, how);
  return failure;
}

}  // namespace

Detector::Detector(DetectorOrders& orders, Duration heartbeat_limit, std::string host, int64_t pid)
    : orders_(orders), limit_(heartbeat_limit), host_(std::move(host)), pid_(pid) {}

Detector::LineView& Detector::view(Peer& peer, LineKind kind) {
  return peer.lines[kind == LineKind::kMain ? 0 : 1];
}

// Watches.

void Detector::addWatch(Time now, WatchId id, int self_rank,
                        const std::vector<WatchedPeer>& peers) {
  dropOldTombstones(now);
  Watch& watch = watches_[id];
  watch.self_rank = self_rank;
  for (const WatchedPeer& peer : peers) attach(now, id, peer);
  for (const WatchedPeer& peer : peers) {
    const auto tombstone = tombstones_.find(peer.incarnation);
    if (tombstone == tombstones_.end() || !tombstone->second.ended) continue;
    return failWatch(id, peerLost(peer, tombstone->second.how));
  }
}

void Detector::attach(Time now, WatchId id, const WatchedPeer& watched) {
  Peer& peer = peers_[watched.incarnation];
  peer.host = watched.host;
  peer.pid = watched.pid;
  peer.watches[id] = watched.rank;
  watches_.at(id).peers.insert_or_assign(watched.incarnation, watched);
  const bool suspect = tombstones_.count(watched.incarnation) > 0;
  for (const LineKind kind : kLineKinds) {
    if (kind == LineKind::kWitness && !watched.witness) continue;
    LineView& line = view(peer, kind);
    if (!std::exchange(line.wanted, true)) {
      line.pause = kFirstCheck;
      line.next_check = suspect ? now : now + kFirstCheck;
    }
    orders_.wantLine(id, watched.incarnation, kind);
  }
}

void Detector::detach(WatchId id, const Incarnation& incarnation) {
  Watch& watch = watches_.at(id);
  const auto counted = watch.peers.find(incarnation);
  if (counted == watch.peers.end()) return;
  const bool witness = counted->second.witness;
  watch.peers.erase(counted);
  Peer& peer = peers_.at(incarnation);
  peer.watches.erase(id);
  if (peer.watches.empty()) peers_.erase(incarnation);
  orders_.unwantLine(id, incarnation, LineKind::kMain);
  if (witness) orders_.unwantLine(id, incarnation, LineKind::kWitness);
}

void Detector::removeWatch(WatchId id) {
  const auto found = watches_.find(id);
  if (found == watches_.end()) return;
  while (!found->second.peers.empty()) {
    const Incarnation incarnation = found->second.peers.begin()->first;
    detach(id, incarnation);
  }
  watches_.erase(found);
}

void Detector::peerLeft(WatchId id, int rank) {
  const auto found = watches_.find(id);
  if (found == watches_.end()) return;
  for (const auto& [incarnation, peer] : found->second.peers) {
    if (peer.rank != rank) continue;
    const Incarnation leaver = incarnation;
    return detach(id, leaver);
  }
}

void Detector::failWatch(WatchId id, Failure failure) {
  Watch& watch = watches_.at(id);
  if (std::exchange(watch.failed, true)) return;
  while (!watch.peers.empty()) {
    const Incarnation incarnation = watch.peers.begin()->first;
    detach(id, incarnation);
  }
  orders_.fail(id, std::move(failure));
}

void Detector::failAllWith(
    const Incarnation& id,
    const std::function<Failure(const Watch&, const WatchedPeer&)>& failure) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  const std::map<WatchId, int> told = found->second.watches;  // failing edits the original
  for (const auto& [watch_id, rank] : told) {
    const Watch& watch = watches_.at(watch_id);
    failWatch(watch_id, failure(watch, watch.peers.at(id)));
  }
}

// What happens to lines.

void Detector::lineUp(Time now, const Incarnation& id, LineKind kind) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  tombstones_.erase(id);
  Peer& peer = found->second;
  LineView& line = view(peer, kind);
  const bool was_cut = line.state == LineState::kDoubted;
  line.state = LineState::kUp;
  line.pause = kFirstCheck;
  if (kind == LineKind::kMain) heard(now, id);
  if (was_cut) declareCut(id);
}

void Detector::heard(Time now, const Incarnation& id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  found->second.last_heard = now;
  found->second.warned = false;
}

void Detector::lineEnded(Time now, const Incarnation& id, LineKind kind, LineEnd end) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  LineView& line = view(found->second, kind);
  if (end == LineEnd::kLeft) return dropLeaver(id);
  // News of a line that stood for watches of the past: it may come late, from the other loop.
  if (line.state != LineState::kUp) return;
  if (end == LineEnd::kAccused) return acceptAccusation(id);
  if (end == LineEnd::kIdle) {
    line.state = LineState::kAbsent;
    line.pause = kFirstCheck;
    line.next_check = now + kFirstCheck;
  } else if (line.wanted) {
    line.state = LineState::kDoubted;
    startProbe(now, id, kind, line);
  }
}

void Detector::probed(Time now, const Incarnation& id, LineKind kind, ProbeEnd end) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  LineView& line = view(found->second, kind);
  // A dial tells of a closed port unasked; any other answer to no question is one to an earlier
  // watch's.
  if (!line.wanted || (!line.probing && end != ProbeEnd::kGone)) return;
  line.probing = false;
  line.next_check = now + line.pause;
  line.pause = std::min<Duration>(line.pause * 2, kLongestCheck);
  judgeProbe(now, id, line, end);
}

void Detector::judgeProbe(Time now, const Incarnation& id, LineView& line, ProbeEnd end) {
  // A line that came up meanwhile says more than the probe: should the process end, so will the
  // line.
  if (line.state == LineState::kUp && end != ProbeEnd::kAlive) return;
  switch (end) {
    case ProbeEnd::kGone:
      return declareDead(now, id, true, "its process ended");
    case ProbeEnd::kUnreachable:
      return declareDead(now, id, false, "its host cannot be reached");
    case ProbeEnd::kSilent:
      if (limit_ > Duration::zero()) declareFrozen(now, id, now - line.probe_began);
      return;
    case ProbeEnd::kAlive:
      tombstones_.erase(id);
      if (line.state == LineState::kDoubted) declareCut(id);
      return;
  }
}

void Detector::startProbe(Time now, const Incarnation& id, LineKind kind, LineView& line) {
  if (std::exchange(line.probing, true)) return;
  line.probe_began = now;
  const bool beats = limit_ > Duration::zero();
  ProbePatience patience;
  patience.connect =
      beats ? std::min<Duration>(limit_, kLongestConnect) : Duration(kLongestConnect);
  patience.answer = beats ? limit_ : Duration(-1);
  orders_.probe(id, kind, patience);
}

// Verdicts.

void Detector::declareDead(Time now, const Incarnation& id, bool ended, const std::string& how) {
  ++counts_.deaths;
  tombstones_[id] = Tombstone{now + kTombstoneFor, ended, how};
  if (!ended) orders_.accuse(id, how);
  failAllWith(id, [&](const Watch&, const WatchedPeer& peer) { return peerLost(peer, how); });
}

void Detector::declareFrozen(Time now, const Incarnation& id, Duration silence) {
  const Peer& peer = peers_.at(id);
  std::string how = "its process has not answered for " + formatSeconds(silence);
  const std::string state = orders_.processState(peer.host, peer.pid);
  if (!state.empty()) how += " (" + state + ")";
  ++counts_.freezes;
  tombstones_[id] = Tombstone{now + kTombstoneFor, false, how};
  orders_.accuse(id, how);
  failAllWith(id, [&](const Watch&, const WatchedPeer& lost) { return peerLost(lost, how); });
}

void Detector::declareCut(const Incarnation& id) {
  ++counts_.lost_links;
  failAllWith(id, [this](const Watch& watch, const WatchedPeer& peer) {
    Failure failure;
    failure.kind = FailureKind::kLinkLost;
    failure.cause.rank = watch.self_rank;
    failure.cause.other_rank = peer.rank;
    failure.cause.host = host_;
    failure.cause.pid = pid_;
    failure.cause.how = "its connection was cut, while the process at the far end (host " +
                        peer.host + ", pid " + std::to_string(peer.pid) + ") lives";
    return failure;
  });
}

void Detector::acceptAccusation(const Incarnation& id) {
  failAllWith(id, [this](const Watch& watch, const WatchedPeer& peer) {
    WatchedPeer self;
    self.rank = watch.self_rank;
    self.host = host_;
    self.pid = pid_;
    return peerLost(self, "this process was frozen and left out: rank " +
                              std::to_string(peer.rank) + " had not heard of it for too long");
  });
}

void Detector::dropLeaver(const Incarnation& id) {
  const std::map<WatchId, int> watches = peers_.at(id).watches;  // detaching edits the original
  for (const auto& [watch, rank] : watches) detach(watch, id);
}

// Time.

void Detector::tick(Time now) {
  creditLateness(now);
  std::vector<Incarnation> ids;  // judging edits peers_
  ids.reserve(peers_.size());
  for (const auto& [id, peer] : peers_) ids.push_back(id);
  for (const Incarnation& id : ids) {
    check(now, id);
    judgeSilence(now, id);
  }
}

void Detector::creditLateness(Time now) {
  const Duration late = due_ ? now - *std::exchange(due_, std::nullopt) : Duration::zero();
  if (limit_ == Duration::zero() || late <= beatCheckPause()) return;
  for (auto& [id, peer] : peers_) {
    peer.last_heard = std::min(now, peer.last_heard + late);
    if (late > limit_ / 2) peer.last_heard = std::max(peer.last_heard, now - limit_ / 2);
  }
}

void Detector::check(Time now, const Incarnation& id) {
  for (const LineKind kind : kLineKinds) {
    const auto found = peers_.find(id);
    if (found == peers_.end()) return;
    LineView& line = view(found->second, kind);
    if (line.wanted && line.state == LineState::kAbsent && !line.probing &&
        line.next_check <= now) {
      startProbe(now, id, kind, line);
    }
  }
}

void Detector::judgeSilence(Time now, const Incarnation& id) {
  const auto found = peers_.find(id);
  if (found == peers_.end() || limit_ == Duration::zero()) return;
  Peer& peer = found->second;
  if (view(peer, LineKind::kMain).state != LineState::kUp) return;
  const Duration silence = now - peer.last_heard;
  if (silence >= limit_) return declareFrozen(now, id, silence);
  if (limit_ <= kWarnAfter || silence < kWarnAfter || std::exchange(peer.warned, true)) return;
  orders_.warn("peer monitor: rank " + std::to_string(peer.watches.begin()->second) + " (host " +
               peer.host + ", pid " + std::to_string(peer.pid) + ") has not been heard of for " +
               formatSeconds(silence) + "; it counts as lost after " + formatSeconds(limit_));
}

// Often enough that this process's own stops show as lateness.
Duration Detector::beatCheckPause() const {
  return std::max<Duration>(limit_ / kTicksPerLimit, kShortestTick);
}

std::optional<Detector::Time> Detector::nextDue(Time now) {
  creditLateness(now);
  const auto consider = [this](Time when) { due_ = due_ ? std::min(*due_, when) : when; };
  for (const auto& [id, peer] : peers_) {
    for (const LineView& line : peer.lines) {
      if (line.wanted && line.state == LineState::kAbsent && !line.probing)
        consider(line.next_check);
    }
    if (limit_ == Duration::zero() || peer.lines[0].state != LineState::kUp) continue;
    consider(now + beatCheckPause());
    consider(peer.last_heard + limit_);
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
