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

// WitnessDesk

bool WitnessDesk::open(const LineTableOptions& options, std::weak_ptr<MonitorCore> core,
                       std::string* error) {
  core_ = std::move(core);
  table_ = LineTable::open(loop_, options, *this, error);
  return table_ != nullptr;
}

void WitnessDesk::leave() {
  if (!table_) return;
  table_->leave();
  table_.reset();
}

void WitnessDesk::ask(std::function<void(LineTable&)> call) {
  paths_.relay->post(paths_.witness_door, [self = shared_from_this(), call = std::move(call)] {
    if (self->table_) call(*self->table_);
  });
}

void WitnessDesk::tell(std::function<void(MonitorCore&)> call) {
  paths_.relay->post(paths_.main_door, [weak = core_, call = std::move(call)] {
    if (const auto core = weak.lock()) call(*core);
  });
}

void WitnessDesk::lineUp(LineKind kind, const Incarnation& peer) {
  tell([kind, peer](MonitorCore& core) { core.lineUp(kind, peer); });
}

// No beats are asked for on witness lines.
void WitnessDesk::lineHeard(LineKind, const Incarnation&) {}

// They go along main lines.
void WitnessDesk::noticed(LineKind, const Incarnation&, const Notice&) {}

void WitnessDesk::lineEnded(LineKind kind, const Incarnation& peer, LineEnd end) {
  tell([kind, peer, end](MonitorCore& core) { core.lineEnded(kind, peer, end); });
}

void WitnessDesk::probed(LineKind kind, const Incarnation& peer, ProbeEnd end, uint64_t number) {
  tell([kind, peer, end, number](MonitorCore& core) { core.probed(kind, peer, end, number); });
}

void WitnessDesk::warn(const std::string& line) {
  log(LogLevel::kWarning, line);
}

// MonitorCore

MonitorCore::MonitorCore(EventLoop& loop, const MonitorOptions& options,
                         std::shared_ptr<Relay> relay, std::shared_ptr<WitnessDesk> witness)
    : incarnation_(options.self),
      loop_(loop),
      host_(options.host),
      relay_(std::move(relay)),
      witness_(std::move(witness)),
      self_(std::make_shared<MonitorCore*>(this)),
      sentry_(*this, options.heartbeat_limit, {options.self, options.host, ::getpid()}) {}

bool MonitorCore::open(const LineTableOptions& options, std::string* error) {
  table_ = LineTable::open(loop_, options, *this, error);
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
  witness_->ask([nonce = watch.nonce, secret = watch.secret](LineTable& table) {
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
  witness_->ask([nonce = found->second.nonce](LineTable& table) { table.forget(nonce); });
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

void MonitorCore::lineUp(LineKind kind, const Incarnation& peer) {
  sentry_.lineUp(Clock::now(), peer, kind);
  afterChange();
}

// Not worth a new timer: the one that stands is too early now, and finds that out itself.
void MonitorCore::lineHeard(LineKind, const Incarnation& peer) {
  sentry_.heard(Clock::now(), peer);
}

void MonitorCore::noticed(LineKind, const Incarnation& peer, const Notice& notice) {
  sentry_.noticed(Clock::now(), peer, notice);
  afterChange();
}

void MonitorCore::lineEnded(LineKind kind, const Incarnation& peer, LineEnd end) {
  sentry_.lineEnded(Clock::now(), peer, kind, end);
  afterChange();
}

void MonitorCore::probed(LineKind kind, const Incarnation& peer, ProbeEnd end, uint64_t number) {
  sentry_.probed(Clock::now(), peer, kind, end, number);
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
    witness_->ask([wish = *wish](LineTable& table) { table.want(wish); });
  }
}

void MonitorCore::unwantLine(WatchId watch, const Incarnation& peer, LineKind kind) {
  if (kind == LineKind::kMain) {
    table_->unwant(peer, watch);
  } else {
    witness_->ask([peer, watch](LineTable& table) { table.unwant(peer, watch); });
  }
}

void MonitorCore::probe(const Incarnation& peer, LineKind kind, const ProbeOrder& order) {
  if (kind == LineKind::kMain) {
    table_->probe(peer, order);
  } else {
    witness_->ask([peer, order](LineTable& table) { table.probe(peer, order); });
  }
}

void MonitorCore::accuse(const Incarnation& peer, const std::string& why) {
  table_->accuse(peer, why);
  witness_->ask([peer, why](LineTable& table) { table.accuse(peer, why); });
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
