#include "peers/sentry.h"

#include <algorithm>
#include <utility>

namespace torchft_ext {
namespace {

constexpr size_t kMostErrands = 256;

bool isOfAnEpoch(Notice::Type type) {
  return type == Notice::Type::kFailed || type == Notice::Type::kLeft;
}

}  // namespace

Sentry::Sentry(SentryOrders& orders, Duration heartbeat_limit, Identity self)
    : orders_(orders),
      self_(std::move(self)),
      detector_(*this, heartbeat_limit, self_.host, self_.pid) {}

// Watches.

void Sentry::addWatch(Time now, WatchId id, const Nonce& nonce, int self_rank,
                      const std::vector<WatchedPeer>& peers) {
  now_ = now;
  Epoch& epoch = epochs_[id];
  epoch.nonce = nonce;
  epoch.self_rank = self_rank;
  epoch.rank_bound = self_rank + 1;
  for (const WatchedPeer& peer : peers)
    epoch.rank_bound = std::max(epoch.rank_bound, peer.rank + 1);
  detector_.addWatch(now, id, self_rank, peers);
  for (const Notice& early : board_.begin(now, nonce)) hear(early);
}

void Sentry::removeWatch(Time now, WatchId id) {
  now_ = now;
  const auto found = epochs_.find(id);
  if (found == epochs_.end()) return;
  Epoch& epoch = found->second;
  if (!epoch.herald) {
    Notice leaving;
    leaving.type = Notice::Type::kLeft;
    leaving.epoch = epoch.nonce;
    leaving.rank = epoch.self_rank;
    end(id, epoch, std::move(leaving));
  }
  detector_.removeWatch(id);
  epoch.removed = true;
  retireFinished();
}

void Sentry::peerLeft(Time now, WatchId id, int rank) {
  now_ = now;
  detector_.peerLeft(now, id, rank);
}

void Sentry::announce(Time now, WatchId id, Failure failure) {
  now_ = now;
  announced_ = id;
  detector_.failWatch(id, std::move(failure));
  announced_.reset();
}

// Notices that go out.

bool Sentry::send(const Incarnation& to, const Notice& notice) {
  if (!orders_.send(to, notice)) return false;
  if (isOfAnEpoch(notice.type)) ++notices_sent_;
  return true;
}

void Sentry::fail(WatchId id, Failure failure) {
  Epoch& epoch = epochs_.at(id);
  end(id, epoch, failureOf(id, epoch, failure));
  if (id != announced_) orders_.fail(id, std::move(failure));
}

Notice Sentry::failureOf(WatchId id, const Epoch& epoch, const Failure& failure) const {
  Notice notice;
  notice.type = Notice::Type::kFailed;
  notice.epoch = epoch.nonce;
  notice.failure = failure;
  const std::optional<Incarnation> culprit = detector_.memberAt(id, failure.cause.rank);
  const bool death = failure.kind == FailureKind::kPeerLost && culprit;
  if (death && detector_.hasEnded(*culprit)) notice.dead = *culprit;
  return notice;
}

void Sentry::end(WatchId id, Epoch& epoch, Notice outcome) {
  board_.end(now_, outcome);
  const auto members = detector_.membersOf(id);
  std::set<Incarnation> neighbours;
  std::set<Incarnation> settled;
  for (const auto& [rank, member] : members) {
    if (detector_.isNeighbour(id, member)) neighbours.insert(member);
    if (isSource(epoch, member) || detector_.hasEnded(member)) settled.insert(member);
  }
  epoch.herald.emplace(static_cast<HeraldOrders&>(*this), id, epoch.self_rank, std::move(outcome));
  epoch.herald->begin(now_, members, neighbours, settled);
}

// Of another epoch it may not know what this process makes of its notice: that a member has died
// says nothing to one whom it had left.
bool Sentry::isSource(const Epoch& epoch, const Incarnation& member) const {
  return member == source_ && epoch.nonce == source_epoch_;
}

void Sentry::left(WatchId id, const Incarnation& peer, int rank) {
  Epoch& epoch = epochs_.at(id);
  Notice notice;
  notice.type = Notice::Type::kLeft;
  notice.epoch = epoch.nonce;
  notice.rank = rank;
  for (const auto& [of, member] : detector_.membersOf(id)) {
    if (!isSource(epoch, member) && member != peer) send(member, notice);
  }
  epoch.leavers.push_back(std::move(notice));
}

void Sentry::ask(WatchId id, Epoch& epoch, const Incarnation& peer) {
  if (!detector_.countsOn(id, peer) || epoch.asked.count(peer) > 0) return;
  Notice question;
  question.type = Notice::Type::kAsk;
  question.epoch = epoch.nonce;
  if (send(peer, question)) epoch.asked.insert(peer);
}

// Notices that come in.

void Sentry::noticed(Time now, const Incarnation& from, const Notice& notice) {
  now_ = now;
  if (notice.type == Notice::Type::kAsk) return answer(from, notice.epoch);
  if (notice.type == Notice::Type::kSeek) return seek(from, notice);
  if (notice.type == Notice::Type::kSeen) return seen(from, notice);
  ++notices_heard_;
  source_ = from;
  source_epoch_ = notice.epoch;
  hear(notice);
  source_ = {};
  retireFinished();
}

void Sentry::hear(const Notice& notice) {
  // That a process has ended is true of all its epochs.
  if (!notice.dead.isZero() && notice.dead != self_.incarnation) {
    detector_.hearOfDeath(now_, notice.dead, notice.failure.cause.how);
    forEachHerald([&](Herald& herald) { herald.left(now_, notice.dead); });
  }
  bool known = false;
  for (auto& [id, epoch] : epochs_) {
    if (epoch.nonce != notice.epoch) continue;
    known = true;
    if (epoch.herald) {
      hearAfter(*epoch.herald, notice);
    } else {
      hearIn(id, epoch, notice);
    }
  }
  if (!known) board_.keep(now_, notice);
}

void Sentry::hearIn(WatchId id, Epoch& epoch, const Notice& notice) {
  if (notice.type == Notice::Type::kLeft) return detector_.peerLeft(now_, id, notice.rank);
  const Cause& cause = notice.failure.cause;
  if (cause.rank >= epoch.rank_bound || cause.other_rank >= epoch.rank_bound) return;
  detector_.failWatch(id, inOwnWords(epoch, notice.failure));
}

void Sentry::hearAfter(Herald& herald, const Notice& notice) {
  if (notice.type == Notice::Type::kLeft) {
    herald.left(now_, notice.rank);
  } else {
    herald.settle(source_);
  }
}

Failure Sentry::inOwnWords(const Epoch& epoch, Failure failure) const {
  if (failure.kind != FailureKind::kPeerLost || failure.cause.rank != epoch.self_rank) {
    return failure;
  }
  failure.cause.host = self_.host;
  failure.cause.pid = self_.pid;
  failure.cause.how =
      "this process was frozen and left out, or cut off: others found that " + failure.cause.how;
  return failure;
}

void Sentry::answer(const Incarnation& from, const Nonce& nonce) {
  if (const Notice* outcome = board_.outcomeOf(nonce)) {
    send(from, *outcome);
    return;
  }
  for (const auto& [id, epoch] : epochs_) {
    if (epoch.nonce != nonce) continue;
    for (const Notice& leaver : epoch.leavers) send(from, leaver);
  }
}

// Whether a process lives that one does not hear of.

void Sentry::askOthers(const Incarnation& peer) {
  Notice question;
  question.type = Notice::Type::kSeek;
  question.epoch = Nonce::random();
  question.sought = peer;
  std::set<Incarnation> others;
  for (const auto& [id, epoch] : epochs_) {
    if (!detector_.countsOn(id, peer)) continue;
    for (const auto& [rank, member] : detector_.membersOf(id)) {
      if (member != peer && detector_.isNeighbour(id, member)) others.insert(member);
    }
  }
  std::erase_if(sought_, [this](const auto& entry) { return !detector_.knows(entry.first); });
  sought_[peer] = question.epoch;
  for (const Incarnation& other : others) send(other, question);
}

void Sentry::seek(const Incarnation& from, const Notice& question) {
  Notice notice = question;
  if (question.sought == self_.incarnation) {
    notice.type = Notice::Type::kSeen;
    send(from, notice);
  } else if (from != question.sought && send(question.sought, notice)) {
    errands_.push_back({from, question.sought, question.epoch});
    if (errands_.size() > kMostErrands) errands_.pop_front();
  }
}

// The errand's end: only what that process says itself is passed on.
void Sentry::seen(const Incarnation& from, const Notice& answer) {
  const auto own = sought_.find(answer.sought);
  if (own != sought_.end() && own->second == answer.epoch) {
    sought_.erase(own);
    detector_.seenElsewhere(answer.sought);
  }
  if (from != answer.sought) return;
  std::erase_if(errands_, [&](const Errand& errand) {
    const bool done = errand.sought == answer.sought && errand.question == answer.epoch;
    if (done) send(errand.asker, answer);
    return done;
  });
}

// What happens to lines.

void Sentry::lineUp(Time now, const Incarnation& peer, LineKind kind) {
  now_ = now;
  detector_.lineUp(now, peer, kind);
  if (kind != LineKind::kMain) return;
  for (auto& [id, epoch] : epochs_) {
    if (epoch.herald) {
      epoch.herald->lineUp(peer);
    } else {
      ask(id, epoch, peer);
    }
  }
  retireFinished();
}

void Sentry::lineEnded(Time now, const Incarnation& peer, LineKind kind, LineEnd end) {
  now_ = now;
  if (kind == LineKind::kMain) {
    for (auto& [id, epoch] : epochs_) {
      epoch.asked.erase(peer);
      if (epoch.herald) epoch.herald->lineEnded(peer);
    }
  }
  detector_.lineEnded(now, peer, kind, end);
  if (end == LineEnd::kLeft) forEachHerald([&](Herald& herald) { herald.left(now_, peer); });
}

void Sentry::probed(Time now, const Incarnation& peer, LineKind kind, ProbeEnd end,
                    uint64_t number) {
  now_ = now;
  detector_.probed(now, peer, kind, end, number);
  if (end == ProbeEnd::kGone) forEachHerald([&](Herald& herald) { herald.left(now_, peer); });
}

// Which lines are wanted: some beyond the end of their epoch.

void Sentry::wantLine(WatchId watch, const Incarnation& peer, LineKind kind) {
  if (kind == LineKind::kMain) epochs_.at(watch).asked.erase(peer);
  orders_.wantLine(watch, peer, kind);
}

void Sentry::unwantLine(WatchId id, const Incarnation& peer, LineKind kind) {
  Epoch& epoch = epochs_.at(id);
  if (kind == LineKind::kMain && epoch.herald && epoch.herald->keep(peer)) return;
  orders_.unwantLine(id, peer, kind);
}

void Sentry::keepLine(WatchId watch, const Incarnation& peer) {
  orders_.wantLine(watch, peer, LineKind::kMain);
}

void Sentry::dropLine(WatchId watch, const Incarnation& peer) {
  orders_.unwantLine(watch, peer, LineKind::kMain);
}

void Sentry::forEachHerald(const std::function<void(Herald&)>& call) {
  for (auto& [id, epoch] : epochs_) {
    if (epoch.herald) call(*epoch.herald);
  }
  retireFinished();
}

void Sentry::retireFinished() {
  for (auto entry = epochs_.begin(); entry != epochs_.end();) {
    const Epoch& epoch = entry->second;
    if (!epoch.removed || !epoch.herald->isDone()) {
      ++entry;
      continue;
    }
    orders_.retire(entry->first);
    entry = epochs_.erase(entry);
  }
}

// Time.

void Sentry::tick(Time now) {
  now_ = now;
  detector_.tick(now);
  for (auto& [id, epoch] : epochs_) {
    if (epoch.herald) epoch.herald->tick(now);
  }
  retireFinished();
}

std::optional<Sentry::Time> Sentry::nextDue(Time now) {
  std::optional<Time> due = detector_.nextDue(now);
  for (const auto& [id, epoch] : epochs_) {
    const auto next = epoch.herald ? epoch.herald->nextDue() : std::nullopt;
    if (next) due = due ? std::min(*due, *next) : *next;
  }
  return due;
}

SentryCounts Sentry::counts() const {
  return {detector_.counts(), notices_sent_, notices_heard_};
}

// Orders of the detector that are passed on as they are.

void Sentry::probe(const Incarnation& peer, LineKind kind, const ProbeOrder& order) {
  orders_.probe(peer, kind, order);
}

void Sentry::accuse(const Incarnation& peer, const std::string& why) {
  orders_.accuse(peer, why);
}

void Sentry::warn(const std::string& line) {
  orders_.warn(line);
}

std::string Sentry::processState(const std::string& host, int64_t pid) {
  return orders_.processState(host, pid);
}

}  // namespace torchft_ext
