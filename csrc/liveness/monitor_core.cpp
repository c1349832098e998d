#include "liveness/monitor_core.h"

#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/log.h"
#include "liveness/process_state.h"

namespace torchft_ext {
namespace {

size_t indexOf(LivenessKind kind) {
  return kind == LivenessKind::kMain ? 0 : 1;
}

}  // namespace

MonitorCore::MonitorCore(EventLoop& loop, const MonitorOptions& options,
                         std::shared_ptr<HandOffThread> hand_off,
                         std::shared_ptr<LoopHandle> backup_handle,
                         std::shared_ptr<BackupConnections> backup)
    : incarnation_(options.self),
      loop_(loop),
      host_(options.host),
      hand_off_(std::move(hand_off)),
      backup_handle_(std::move(backup_handle)),
      backup_(std::move(backup)),
      self_(std::make_shared<MonitorCore*>(this)),
      propagation_(*this, options.heartbeat_limit, {options.self, options.host, ::getpid()}) {}

bool MonitorCore::open(const LivenessTableOptions& options, std::string* error) {
  table_ = LivenessTable::open(
      loop_, options, [this](const ConnectionReport& report) { onReport(report); }, error);
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

void MonitorCore::askBackup(std::function<void(LivenessTable&)> call) {
  hand_off_->post(backup_handle_, [backup = backup_, call = std::move(call)] {
    if (backup->table) call(*backup->table);
  });
}

// What on_failure captured is foreign: it may close descriptors when it ends.
void MonitorCore::dropElsewhere(WatchEntry& watch) {
  if (watch.on_failure) hand_off_->run([ended = std::exchange(watch.on_failure, nullptr)] {});
}

std::vector<WatchedPeer> MonitorCore::watchable(const WatchRequest& request) const {
  std::vector<WatchedPeer> watched;
  std::set<Incarnation> seen;
  for (const MonitoredPeer& peer : request.peers) {
    const bool own = peer.rank == request.self_rank || peer.incarnation == incarnation_;
    if (own || peer.liveness_addresses.empty() || !seen.insert(peer.incarnation).second) continue;
    WatchedPeer entry;
    entry.rank = peer.rank;
    entry.incarnation = peer.incarnation;
    entry.host = peer.host;
    entry.pid = peer.pid;
    entry.backup = peer.liveness_addresses.size() > 1;
    watched.push_back(std::move(entry));
  }
  return watched;
}

void MonitorCore::addWatch(WatchRequest request) {
  if (!table_) return;
  WatchEntry& watch = watches_[request.id];
  watch.nonce = request.nonce;
  watch.secret = request.secret;
  watch.self_rank = request.self_rank;
  watch.on_failure = std::move(request.on_failure);
  for (const MonitoredPeer& peer : request.peers) {
    watch.addresses[peer.incarnation] = peer.liveness_addresses;
  }
  table_->expect(watch.nonce, watch.secret);
  askBackup([nonce = watch.nonce, secret = watch.secret](LivenessTable& table) {
    table.expect(nonce, secret);
  });
  propagation_.addWatch(Clock::now(), request.id, request.nonce, request.self_rank,
                        watchable(request));
  afterChange();
}

void MonitorCore::removeWatch(WatchId id) {
  const auto found = watches_.find(id);
  if (!table_ || found == watches_.end()) return;
  dropElsewhere(found->second);
  propagation_.removeWatch(Clock::now(), id);
  afterChange();
}

void MonitorCore::retire(WatchId id) {
  const auto found = watches_.find(id);
  table_->forget(found->second.nonce);
  askBackup([nonce = found->second.nonce](LivenessTable& table) { table.forget(nonce); });
  watches_.erase(found);
}

void MonitorCore::peerLeft(WatchId id, int rank) {
  if (!table_) return;
  propagation_.peerLeft(Clock::now(), id, rank);
  afterChange();
}

void MonitorCore::announce(WatchId id, const Failure& failure) {
  if (!table_) return;
  propagation_.announce(Clock::now(), id, failure);
  afterChange();
}

void MonitorCore::cutForTest(const Incarnation& peer) {
  if (table_) table_->cutForTest(peer);
}

// Reports of the tables.

void MonitorCore::onReport(const ConnectionReport& report) {
  const auto now = Clock::now();
  switch (report.what) {
    case ConnectionReport::What::kUp:
      propagation_.connectionUp(now, report.peer, report.kind);
      break;
    case ConnectionReport::What::kHeard:
      propagation_.heard(now, report.peer);
      return;  // not worth a new timer: the one that stands is too early now, and finds that out
    case ConnectionReport::What::kNotice:
      propagation_.noticed(now, report.peer, report.notice);
      break;
    case ConnectionReport::What::kEnded:
      propagation_.connectionEnded(now, report.peer, report.kind, report.end);
      break;
    case ConnectionReport::What::kProbed:
      propagation_.probed(now, report.peer, report.kind, report.answer, report.number);
      break;
  }
  afterChange();
}

// Orders of the failure propagation.

void MonitorCore::fail(WatchId watch, Failure failure) {
  PeerMonitor::OnFailure tell = std::exchange(watches_.at(watch).on_failure, nullptr);
  if (!tell) return;
  publish();  // who is told may look at them
  hand_off_->run([tell = std::move(tell), failure = std::move(failure)]() mutable {
    tell(std::move(failure));
  });
}

std::optional<LivenessRequest> MonitorCore::wishFor(WatchId id, const Incarnation& peer,
                                                    LivenessKind kind) const {
  const WatchEntry& watch = watches_.at(id);
  const std::vector<SocketAddress>& addresses = watch.addresses.at(peer);
  if (indexOf(kind) >= addresses.size()) return std::nullopt;
  LivenessRequest wish;
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

void MonitorCore::wantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) {
  const std::optional<LivenessRequest> wish = wishFor(watch, peer, kind);
  if (!wish) return;
  if (kind == LivenessKind::kMain) {
    table_->want(*wish);
  } else {
    askBackup([wish = *wish](LivenessTable& table) { table.want(wish); });
  }
}

void MonitorCore::unwantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) {
  if (kind == LivenessKind::kMain) {
    table_->unwant(peer, watch);
  } else {
    askBackup([peer, watch](LivenessTable& table) { table.unwant(peer, watch); });
  }
}

void MonitorCore::probe(const Incarnation& peer, LivenessKind kind, const ProbeOrder& order) {
  if (kind == LivenessKind::kMain) {
    table_->probe(peer, order);
  } else {
    askBackup([peer, order](LivenessTable& table) { table.probe(peer, order); });
  }
}

void MonitorCore::accuse(const Incarnation& peer, const std::string& why) {
  table_->accuse(peer, why);
  askBackup([peer, why](LivenessTable& table) { table.accuse(peer, why); });
}

void MonitorCore::warn(const std::string& text) {
  log(LogLevel::kWarning, text);
}

std::string MonitorCore::processState(const std::string& host, int64_t pid) {
  return host == host_ ? describeProcessState(pid) : std::string();
}

// Time.

void MonitorCore::afterChange() {
  loop_.cancel(std::exchange(timer_, 0));
  if (const std::optional<Clock::time_point> due = propagation_.nextDue(Clock::now())) {
    timer_ = loop_.runAt(*due, [this, weak = std::weak_ptr(self_)] {
      if (weak.lock()) onTick();
    });
  }
  publish();
}

void MonitorCore::publish() {
  MutexLock lock(mutex_);
  published_ = propagation_.counts();
}

void MonitorCore::onTick() {
  timer_ = 0;
  propagation_.tick(Clock::now());
  afterChange();
}

PropagationCounts MonitorCore::counts() const {
  MutexLock lock(mutex_);
  return published_;
}

}  // namespace torchft_ext
