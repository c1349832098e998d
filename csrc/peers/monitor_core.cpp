#include "peers/monitor_core.h"

#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/log.h"
#include "peers/process_state.h"

namespace torchft_ext {
namespace {

size_t indexOf(LineKind kind) {
  return kind == LineKind::kMain ? 0 : 1;
}

}  // namespace

MonitorCore::MonitorCore(EventLoop& loop, const MonitorOptions& options,
                         std::shared_ptr<Relay> relay, std::shared_ptr<LoopDoor> witness_door,
                         std::shared_ptr<WitnessLines> witness)
    : incarnation_(options.self),
      loop_(loop),
      host_(options.host),
      relay_(std::move(relay)),
      witness_door_(std::move(witness_door)),
      witness_(std::move(witness)),
      self_(std::make_shared<MonitorCore*>(this)),
      sentry_(*this, options.heartbeat_limit, {options.self, options.host, ::getpid()}) {}

bool MonitorCore::open(const LineTableOptions& options, std::string* error) {
  table_ = LineTable::open(
      loop_, options, [this](const LineReport& report) { onReport(report); }, error);
  return table_ != nullptr;
}

void MonitorCore::leave() {
  if (!table_) return;
  loop_.cancel(std::exchange(timer_, 0));
  table_->leave();
  table_.reset();
  for (auto& [id, watch] : watches_) dropElsewhere(watch);
  watches_.clear();
}

void MonitorCore::askWitness(std::function<void(LineTable&)> call) {
  relay_->post(witness_door_, [witness = witness_, call = std::move(call)] {
    if (witness->table) call(*witness->table);
  });
}

// What on_failure captured is foreign: it may close descriptors when it ends.
void MonitorCore::dropElsewhere(Watch& watch) {
  if (watch.on_failure) relay_->run([ended = std::exchange(watch.on_failure, nullptr)] {});
}

std::vector<WatchedPeer> MonitorCore::watchable(const WatchRequest& request) const {
  std::vector<WatchedPeer> watched;
  std::set<Incarnation> seen;
  for (const MonitoredPeer& peer : request.peers) {
    const bool own = peer.rank == request.self_rank || peer.incarnation == incarnation_;
    if (own || peer.line_addresses.empty() || !seen.insert(peer.incarnation).second) continue;
    WatchedPeer entry;
    entry.rank = peer.rank;
    entry.incarnation = peer.incarnation;
    entry.host = peer.host;
    entry.pid = peer.pid;
    entry.witness = peer.line_addresses.size() > 1;
    watched.push_back(std::move(entry));
  }
  return watched;
}

void MonitorCore::addWatch(WatchRequest request) {
  if (!table_) return;
  Watch& watch = watches_[request.id];
  watch.nonce = request.nonce;
  watch.secret = request.secret;
  watch.self_rank = request.self_rank;
  watch.on_failure = std::move(request.on_failure);
  for (const MonitoredPeer& peer : request.peers) {
    watch.addresses[peer.incarnation] = peer.line_addresses;
  }
  table_->expect(watch.nonce, watch.secret);
  askWitness([nonce = watch.nonce, secret = watch.secret](LineTable& table) {
    table.expect(nonce, secret);
  });
  sentry_.addWatch(Clock::now(), request.id, request.nonce, request.self_rank, watchable(request));
  afterChange();
}

void MonitorCore::removeWatch(WatchId id) {
  const auto found = watches_.find(id);
  if (!table_ || found == watches_.end()) return;
  dropElsewhere(found->second);
  sentry_.removeWatch(Clock::now(), id);
  afterChange();
}

void MonitorCore::retire(WatchId id) {
  const auto found = watches_.find(id);
  table_->forget(found->second.nonce);
  askWitness([nonce = found->second.nonce](LineTable& table) { table.forget(nonce); });
  watches_.erase(found);
}

void MonitorCore::peerLeft(WatchId id, int rank) {
  if (!table_) return;
  sentry_.peerLeft(Clock::now(), id, rank);
  afterChange();
}

void MonitorCore::announce(WatchId id, const Failure& failure) {
  if (!table_) return;
  sentry_.announce(Clock::now(), id, failure);
  afterChange();
}

void MonitorCore::cutForTest(const Incarnation& peer) {
  if (table_) table_->cutForTest(peer);
}

// Reports of the tables.

void MonitorCore::onReport(const LineReport& report) {
  const auto now = Clock::now();
  switch (report.what) {
    case LineReport::What::kUp:
      sentry_.lineUp(now, report.peer, report.kind);
      break;
    case LineReport::What::kHeard:
      sentry_.heard(now, report.peer);
      return;  // not worth a new timer: the one that stands is too early now, and finds that out
    case LineReport::What::kNotice:
      sentry_.noticed(now, report.peer, report.notice);
      break;
    case LineReport::What::kEnded:
      sentry_.lineEnded(now, report.peer, report.kind, report.end);
      break;
    case LineReport::What::kProbed:
      sentry_.probed(now, report.peer, report.kind, report.answer, report.number);
      break;
  }
  afterChange();
}

// Orders of the sentry.

void MonitorCore::fail(WatchId watch, Failure failure) {
  PeerMonitor::OnFailure tell = std::exchange(watches_.at(watch).on_failure, nullptr);
  if (!tell) return;
  publish();  // who is told may look at them
  relay_->run([tell = std::move(tell), failure = std::move(failure)]() mutable {
    tell(std::move(failure));
  });
}

std::optional<LineWish> MonitorCore::wishFor(WatchId id, const Incarnation& peer,
                                             LineKind kind) const {
  const Watch& watch = watches_.at(id);
  const std::vector<SocketAddress>& addresses = watch.addresses.at(peer);
  if (indexOf(kind) >= addresses.size()) return std::nullopt;
  LineWish wish;
  wish.watch = id;
  wish.peer = peer;
  wish.address = addresses[indexOf(kind)];
  wish.nonce = watch.nonce;
  wish.secret = watch.secret;
  wish.self_rank = watch.self_rank;
  return wish;
}

bool MonitorCore::send(const Incarnation& to, const Notice& notice) {
  return table_->tell(to, notice);
}

void MonitorCore::wantLine(WatchId watch, const Incarnation& peer, LineKind kind) {
  const std::optional<LineWish> wish = wishFor(watch, peer, kind);
  if (!wish) return;
  if (kind == LineKind::kMain) {
    table_->want(*wish);
  } else {
    askWitness([wish = *wish](LineTable& table) { table.want(wish); });
  }
}

void MonitorCore::unwantLine(WatchId watch, const Incarnation& peer, LineKind kind) {
  if (kind == LineKind::kMain) {
    table_->unwant(peer, watch);
  } else {
    askWitness([peer, watch](LineTable& table) { table.unwant(peer, watch); });
  }
}

void MonitorCore::probe(const Incarnation& peer, LineKind kind, const ProbeOrder& order) {
  if (kind == LineKind::kMain) {
    table_->probe(peer, order);
  } else {
    askWitness([peer, order](LineTable& table) { table.probe(peer, order); });
  }
}

void MonitorCore::accuse(const Incarnation& peer, const std::string& why) {
  table_->accuse(peer, why);
  askWitness([peer, why](LineTable& table) { table.accuse(peer, why); });
}

void MonitorCore::warn(const std::string& line) {
  log(LogLevel::kWarning, line);
}

std::string MonitorCore::processState(const std::string& host, int64_t pid) {
  return host == host_ ? describeProcessState(pid) : std::string();
}

// Time.

void MonitorCore::afterChange() {
  loop_.cancel(std::exchange(timer_, 0));
  if (const std::optional<Clock::time_point> due = sentry_.nextDue(Clock::now())) {
    timer_ = loop_.runAt(*due, [this, weak = std::weak_ptr(self_)] {
      if (weak.lock()) onTick();
    });
  }
  publish();
}

void MonitorCore::publish() {
  MutexLock lock(mutex_);
  published_ = sentry_.counts();
}

void MonitorCore::onTick() {
  timer_ = 0;
  sentry_.tick(Clock::now());
  afterChange();
}

SentryCounts MonitorCore::counts() const {
  MutexLock lock(mutex_);
  return published_;
}

}  // namespace torchft_ext
