#include "liveness/failure_propagation.h"

#include <algorithm>
#include <utility>

namespace torchft_ext {
namespace {

constexpr size_t kMostForwardedQueries = 256;

bool isOfAGeneration(Notice::Type type) {
  return type == Notice::Type::kFailed || type == Notice::Type::kLeft;
}

}  // namespace

FailurePropagation::FailurePropagation(PropagationOrders& orders, Duration heartbeat_limit,
                                       Identity self)
    : orders_(orders),
      self_(std::move(self)),
      detector_(*this, heartbeat_limit, self_.host, self_.pid) {}

// Watches.

void FailurePropagation::addWatch(Time now, WatchId id, const Nonce& nonce, int self_rank,
                                  const std::vector<WatchedPeer>& peers) {
  now_ = now;
  Generation& generation = generations_[id];
  generation.nonce = nonce;
  generation.self_rank = self_rank;
  generation.rank_bound = self_rank + 1;
  for (const WatchedPeer& peer : peers)
    generation.rank_bound = std::max(generation.rank_bound, peer.rank + 1);
  detector_.addWatch(now, id, self_rank, peers);
  for (const Notice& early : cache_.begin(now, nonce)) hear(early);
}

void FailurePropagation::removeWatch(Time now, WatchId id) {
  now_ = now;
  const auto found = generations_.find(id);
  if (found == generations_.end()) return;
  Generation& generation = found->second;
  if (!generation.broadcast) {
    Notice leaving;
    leaving.type = Notice::Type::kLeft;
    leaving.generation = generation.nonce;
    leaving.rank = generation.self_rank;
    end(id, generation, std::move(leaving));
  }
  detector_.removeWatch(id);
  generation.removed = true;
  retireFinished();
}

void FailurePropagation::peerLeft(Time now, WatchId id, int rank) {
  now_ = now;
  detector_.peerLeft(now, id, rank);
}

void FailurePropagation::announce(Time now, WatchId id, Failure failure) {
  now_ = now;
  announced_ = id;
  detector_.failWatch(id, std::move(failure));
  announced_.reset();
}

// Notices that go out.

bool FailurePropagation::send(const Incarnation& to, const Notice& notice) {
  if (!orders_.send(to, notice)) return false;
  if (isOfAGeneration(notice.type)) ++notices_sent_;
  return true;
}

void FailurePropagation::fail(WatchId id, Failure failure) {
  Generation& generation = generations_.at(id);
  end(id, generation, failureOf(id, generation, failure));
  if (id != announced_) orders_.fail(id, std::move(failure));
}

Notice FailurePropagation::failureOf(WatchId id, const Generation& generation,
                                     const Failure& failure) const {
  Notice notice;
  notice.type = Notice::Type::kFailed;
  notice.generation = generation.nonce;
  notice.failure = failure;
  const std::optional<Incarnation> culprit = detector_.memberAt(id, failure.cause.rank);
  const bool death = failure.kind == FailureKind::kPeerLost && culprit;
  if (death && detector_.hasEnded(*culprit)) notice.dead = *culprit;
  return notice;
}

void FailurePropagation::end(WatchId id, Generation& generation, Notice outcome) {
  cache_.end(now_, outcome);
  const auto members = detector_.membersOf(id);
  std::set<Incarnation> neighbours;
  std::set<Incarnation> settled;
  for (const auto& [rank, member] : members) {
    if (detector_.isNeighbour(id, member)) neighbours.insert(member);
    if (isSource(generation, member) || detector_.hasEnded(member)) settled.insert(member);
  }
  generation.broadcast.emplace(static_cast<BroadcastOrders&>(*this), id, generation.self_rank,
                               std::move(outcome));
  generation.broadcast->begin(now_, members, neighbours, settled);
}

// Of another generation it may not know what this process makes of its notice: that a member has
// died says nothing to one whom it had left.
bool FailurePropagation::isSource(const Generation& generation, const Incarnation& member) const {
  return member == source_ && generation.nonce == source_generation_;
}

void FailurePropagation::left(WatchId id, const Incarnation& peer, int rank) {
  Generation& generation = generations_.at(id);
  Notice notice;
  notice.type = Notice::Type::kLeft;
  notice.generation = generation.nonce;
  notice.rank = rank;
  for (const auto& [of, member] : detector_.membersOf(id)) {
    if (!isSource(generation, member) && member != peer) send(member, notice);
  }
  generation.leavers.push_back(std::move(notice));
}

void FailurePropagation::ask(WatchId id, Generation& generation, const Incarnation& peer) {
  if (!detector_.countsOn(id, peer) || generation.asked.count(peer) > 0) return;
  Notice question;
  question.type = Notice::Type::kAsk;
  question.generation = generation.nonce;
  if (send(peer, question)) generation.asked.insert(peer);
}

// Notices that come in.

void FailurePropagation::noticed(Time now, const Incarnation& from, const Notice& notice) {
  now_ = now;
  if (notice.type == Notice::Type::kAsk) return answer(from, notice.generation);
  if (notice.type == Notice::Type::kSeek) return seek(from, notice);
  if (notice.type == Notice::Type::kSeen) return seen(from, notice);
  ++notices_heard_;
  source_ = from;
  source_generation_ = notice.generation;
  hear(notice);
  source_ = {};
  retireFinished();
}

void FailurePropagation::hear(const Notice& notice) {
  // That a process has ended is true of all its generations.
  if (!notice.dead.isZero() && notice.dead != self_.incarnation) {
    detector_.hearOfDeath(now_, notice.dead);
    forEachBroadcast([&](OutcomeBroadcast& broadcast) { broadcast.left(now_, notice.dead); });
  }
  bool known = false;
  for (auto& [id, generation] : generations_) {
    if (generation.nonce != notice.generation) continue;
    known = true;
    if (generation.broadcast) {
      hearAfter(*generation.broadcast, notice);
    } else {
      hearIn(id, generation, notice);
    }
  }
  if (!known) cache_.keep(now_, notice);
}

void FailurePropagation::hearIn(WatchId id, Generation& generation, const Notice& notice) {
  if (notice.type == Notice::Type::kLeft) return detector_.peerLeft(now_, id, notice.rank);
  const Cause& cause = notice.failure.cause;
  if (cause.rank >= generation.rank_bound || cause.other_rank >= generation.rank_bound) return;
  detector_.failWatch(id, inOwnWords(generation, notice.failure));
}

void FailurePropagation::hearAfter(OutcomeBroadcast& broadcast, const Notice& notice) {
  if (notice.type == Notice::Type::kLeft) {
    broadcast.left(now_, notice.rank);
  } else {
    broadcast.settle(source_);
  }
}

Failure FailurePropagation::inOwnWords(const Generation& generation, Failure failure) const {
  if (failure.kind != FailureKind::kPeerLost || failure.cause.rank != generation.self_rank) {
    return failure;
  }
  failure.cause.host = self_.host;
  failure.cause.pid = self_.pid;
  failure.cause.how =
      "this process was frozen and left out, or cut off: others found that " + failure.cause.how;
  return failure;
}

void FailurePropagation::answer(const Incarnation& from, const Nonce& nonce) {
  if (const Notice* outcome = cache_.outcomeOf(nonce)) {
    send(from, *outcome);
    return;
  }
  for (const auto& [id, generation] : generations_) {
    if (generation.nonce != nonce) continue;
    for (const Notice& leaver : generation.leavers) send(from, leaver);
  }
}

// Whether a process lives that one does not hear of.

void FailurePropagation::askOthers(const Incarnation& peer) {
  Notice question;
  question.type = Notice::Type::kSeek;
  question.generation = Nonce::random();
  question.sought = peer;
  std::set<Incarnation> others;
  for (const auto& [id, generation] : generations_) {
    if (!detector_.countsOn(id, peer)) continue;
    for (const auto& [rank, member] : detector_.membersOf(id)) {
      if (member != peer && detector_.isNeighbour(id, member)) others.insert(member);
    }
  }
  std::erase_if(sought_, [this](const auto& entry) { return !detector_.knows(entry.first); });
  sought_[peer] = question.generation;
  for (const Incarnation& other : others) send(other, question);
}

void FailurePropagation::seek(const Incarnation& from, const Notice& question) {
  Notice notice = question;
  if (question.sought == self_.incarnation) {
    notice.type = Notice::Type::kSeen;
    send(from, notice);
  } else if (from != question.sought && send(question.sought, notice)) {
    forwarded_queries_.push_back({from, question.sought, question.generation});
    if (forwarded_queries_.size() > kMostForwardedQueries) forwarded_queries_.pop_front();
  }
}

// The query's end: only what that process says itself is passed on.
void FailurePropagation::seen(const Incarnation& from, const Notice& answer) {
  const auto own = sought_.find(answer.sought);
  if (own != sought_.end() && own->second == answer.generation) {
    sought_.erase(own);
    detector_.seenElsewhere(answer.sought);
  }
  if (from != answer.sought) return;
  std::erase_if(forwarded_queries_, [&](const ForwardedQuery& query) {
    const bool done = query.sought == answer.sought && query.question == answer.generation;
    if (done) send(query.asker, answer);
    return done;
  });
}

// What happens to connections.

void FailurePropagation::connectionUp(Time now, const Incarnation& peer, LivenessKind kind) {
  now_ = now;
  detector_.connectionUp(now, peer, kind);
  if (kind != LivenessKind::kMain) return;
  for (auto& [id, generation] : generations_) {
    if (generation.broadcast) {
      generation.broadcast->connectionUp(peer);
    } else {
      ask(id, generation, peer);
    }
  }
  retireFinished();
}

void FailurePropagation::connectionEnded(Time now, const Incarnation& peer, LivenessKind kind,
                                         LivenessEnd end) {
  now_ = now;
  if (kind == LivenessKind::kMain) {
    for (auto& [id, generation] : generations_) {
      generation.asked.erase(peer);
      if (generation.broadcast) generation.broadcast->connectionEnded(peer);
    }
  }
  detector_.connectionEnded(now, peer, kind, end);
  if (end == LivenessEnd::kLeft)
    forEachBroadcast([&](OutcomeBroadcast& broadcast) { broadcast.left(now_, peer); });
}

void FailurePropagation::probed(Time now, const Incarnation& peer, LivenessKind kind,
                                Liveness answer, uint64_t number) {
  now_ = now;
  detector_.probed(now, peer, kind, answer, number);
  if (answer == Liveness::kGone)
    forEachBroadcast([&](OutcomeBroadcast& broadcast) { broadcast.left(now_, peer); });
}

// Which connections are wanted: some beyond the end of their generation.

void FailurePropagation::wantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) {
  if (kind == LivenessKind::kMain) generations_.at(watch).asked.erase(peer);
  orders_.wantConnection(watch, peer, kind);
}

void FailurePropagation::unwantConnection(WatchId id, const Incarnation& peer, LivenessKind kind) {
  Generation& generation = generations_.at(id);
  if (kind == LivenessKind::kMain && generation.broadcast && generation.broadcast->keep(peer))
    return;
  orders_.unwantConnection(id, peer, kind);
}

void FailurePropagation::keepConnection(WatchId watch, const Incarnation& peer) {
  orders_.wantConnection(watch, peer, LivenessKind::kMain);
}

void FailurePropagation::dropConnection(WatchId watch, const Incarnation& peer) {
  orders_.unwantConnection(watch, peer, LivenessKind::kMain);
}

void FailurePropagation::forEachBroadcast(const std::function<void(OutcomeBroadcast&)>& call) {
  for (auto& [id, generation] : generations_) {
    if (generation.broadcast) call(*generation.broadcast);
  }
  retireFinished();
}

void FailurePropagation::retireFinished() {
  for (auto entry = generations_.begin(); entry != generations_.end();) {
    const Generation& generation = entry->second;
    if (!generation.removed || !generation.broadcast->isDone()) {
      ++entry;
      continue;
    }
    orders_.retire(entry->first);
    entry = generations_.erase(entry);
  }
}

// Time.

void FailurePropagation::tick(Time now) {
  now_ = now;
  detector_.tick(now);
  for (auto& [id, generation] : generations_) {
    if (generation.broadcast) generation.broadcast->tick(now);
  }
  retireFinished();
}

std::optional<FailurePropagation::Time> FailurePropagation::nextDue(Time now) {
  std::optional<Time> due = detector_.nextDue(now);
  for (const auto& [id, generation] : generations_) {
    const auto next = generation.broadcast ? generation.broadcast->nextDue() : std::nullopt;
    if (next) due = due ? std::min(*due, *next) : *next;
  }
  return due;
}

PropagationCounts FailurePropagation::counts() const {
  return {detector_.counts(), notices_sent_, notices_heard_};
}

// Orders of the detector that are passed on as they are.

void FailurePropagation::probe(const Incarnation& peer, LivenessKind kind,
                               const ProbeOrder& order) {
  orders_.probe(peer, kind, order);
}

void FailurePropagation::accuse(const Incarnation& peer, const std::string& why) {
  orders_.accuse(peer, why);
}

void FailurePropagation::warn(const std::string& text) {
  orders_.warn(text);
}

std::string FailurePropagation::processState(const std::string& host, int64_t pid) {
  return orders_.processState(host, pid);
}

}  // namespace torchft_ext
