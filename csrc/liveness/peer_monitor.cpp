#include "liveness/peer_monitor.h"

#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include "liveness/hand_off_thread.h"
#include "liveness/monitor_core.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kOpenWithin{10};
constexpr std::chrono::seconds kDestroyWithin{1};

// Unless the monitor has stopped.
void tell(LoopHandle& handle, const std::weak_ptr<MonitorCore>& core,
          std::function<void(MonitorCore&)> call) {
  handle.post([core, call = std::move(call)] {
    if (const auto held = core.lock()) call(*held);
  });
}

LivenessTableOptions mainTable(const MonitorOptions& monitor,
                               std::shared_ptr<std::atomic<int>> connections) {
  LivenessTableOptions options;
  options.kind = LivenessKind::kMain;
  options.self = monitor.self;
  options.bind_address = monitor.bind_address;
  options.ports = monitor.ports;
  options.heartbeat_limit = monitor.heartbeat_limit;
  options.idle_grace = monitor.idle_connection_grace;
  options.connections = std::move(connections);
  return options;
}

LivenessTableOptions backupTable(const MonitorOptions& monitor,
                                 std::shared_ptr<std::atomic<int>> connections) {
  LivenessTableOptions options = mainTable(monitor, std::move(connections));
  options.kind = LivenessKind::kBackup;
  options.heartbeat_limit = Duration(0);  // no beats are asked for
  return options;
}

}  // namespace

PeerMonitor::Watch::Watch(std::shared_ptr<LoopHandle> handle, std::weak_ptr<MonitorCore> core,
                          uint64_t id)
    : handle_(std::move(handle)), core_(std::move(core)), id_(id) {}

PeerMonitor::Watch::~Watch() {
  tell(*handle_, core_, [id = id_](MonitorCore& core) { core.removeWatch(id); });
}

void PeerMonitor::Watch::peerLeft(int rank) {
  tell(*handle_, core_, [id = id_, rank](MonitorCore& core) { core.peerLeft(id, rank); });
}

void PeerMonitor::Watch::announce(const Failure& failure) {
  tell(*handle_, core_, [id = id_, failure](MonitorCore& core) { core.announce(id, failure); });
}

PeerMonitor::PeerMonitor(const MonitorOptions& options)
    : main_loop_("ft-monitor", LoopTraits{true, true}),
      backup_loop_("ft-backup", LoopTraits{true, true}),
      hand_off_(std::make_shared<HandOffThread>(main_loop_.isRealtime())),
      main_handle_(std::make_shared<LoopHandle>(main_loop_)),
      backup_handle_(std::make_shared<LoopHandle>(backup_loop_)),
      backup_(std::make_shared<BackupConnections>()),
      core_(
          std::make_shared<MonitorCore>(main_loop_, options, hand_off_, backup_handle_, backup_)) {}

PeerMonitor::~PeerMonitor() {
  stop(Deadline::after(kDestroyWithin));
}

std::shared_ptr<PeerMonitor> PeerMonitor::start(const MonitorOptions& options, std::string* error) {
  try {
    const std::shared_ptr<PeerMonitor> monitor(new PeerMonitor(options));
    if (monitor->open(options, error)) return monitor;
  } catch (const std::system_error& refused) {
    if (error != nullptr) *error = refused.what();
  }
  return nullptr;
}

bool PeerMonitor::open(const MonitorOptions& options, std::string* error) {
  struct Opening {  // shared with the loops, which may come to it too late
    std::string error;
    SocketAddress address;
  };
  const Deadline deadline = Deadline::after(kOpenWithin);
  const auto main = std::make_shared<Opening>();
  const auto backup = std::make_shared<Opening>();
  const bool main_answered = main_loop_.runOnLoop(
      [main, core = core_, table = mainTable(options, main_connections_)] {
        if (core->open(table, &main->error)) main->address = core->address();
      },
      deadline);
  auto on_report = [hand_off = hand_off_, handle = main_handle_,
                    core = std::weak_ptr(core_)](const ConnectionReport& report) {
    using What = ConnectionReport::What;
    // No beats are asked for on backup connections, and notices go along main connections.
    if (report.what == What::kHeard || report.what == What::kNotice) return;
    hand_off->post(handle, [core, report] {
      if (const auto held = core.lock()) held->onReport(report);
    });
  };
  const bool backup_answered = backup_loop_.runOnLoop(
      [backup, connections = backup_, table = backupTable(options, backup_connections_), on_report,
       loop = &backup_loop_] {
        connections->table = LivenessTable::open(*loop, table, on_report, &backup->error);
        if (connections->table) backup->address = connections->table->address();
      },
      deadline);
  std::string why;
  if (!main_answered || !backup_answered) {
    why = "its threads do not answer";
  } else {
    addresses_ = {main->address, backup->address};
    why = main->error.empty() ? backup->error : main->error;
  }
  if (!why.empty() && error != nullptr) *error = why;
  return why.empty();
}

std::unique_ptr<PeerMonitor::Watch> PeerMonitor::watch(const Nonce& nonce,
                                                       const GenerationSecret& secret,
                                                       int self_rank,
                                                       std::vector<MonitoredPeer> peers,
                                                       OnFailure on_failure) {
  auto request = std::make_shared<MonitorCore::WatchRequest>();
  request->id = next_watch_.fetch_add(1, std::memory_order_relaxed);
  request->nonce = nonce;
  request->secret = secret;
  request->self_rank = self_rank;
  request->peers = std::move(peers);
  request->on_failure = std::move(on_failure);
  auto handle = std::make_unique<Watch>(main_handle_, core_, request->id);
  tell(*main_handle_, core_, [request](MonitorCore& core) { core.addWatch(std::move(*request)); });
  return handle;
}

MonitorStats PeerMonitor::stats() const {
  const PropagationCounts counts = core_->counts();
  MonitorStats stats;
  stats.private_tables = main_loop_.hasPrivateTable() && backup_loop_.hasPrivateTable();
  stats.realtime = main_loop_.isRealtime() && backup_loop_.isRealtime();
  stats.connections = main_connections_->load(std::memory_order_relaxed) +
                      backup_connections_->load(std::memory_order_relaxed);
  stats.watches = counts.detector.watches;
  stats.deaths = counts.detector.deaths;
  stats.freezes = counts.detector.freezes;
  stats.lost_connections = counts.detector.lost_connections;
  stats.notices_sent = counts.notices_sent;
  stats.notices_heard = counts.notices_heard;
  return stats;
}

bool PeerMonitor::stop(Deadline deadline) {
  main_handle_->close();
  backup_handle_->close();
  main_loop_.runOnLoop([core = core_] { core->leave(); }, deadline);
  backup_loop_.runOnLoop(
      [connections = backup_] {
        if (connections->table) connections->table->leave();
        connections->table.reset();
      },
      deadline);
  const bool main_ended = main_loop_.stop(deadline);
  const bool backup_ended = backup_loop_.stop(deadline);
  return hand_off_->stop(deadline) && main_ended && backup_ended;
}

void PeerMonitor::cutConnectionForTest(const Incarnation& peer) {
  tell(*main_handle_, core_, [peer](MonitorCore& core) { core.cutForTest(peer); });
}

void PeerMonitor::holdUpForTest(Duration how_long) {
  for (EventLoop* loop : {&main_loop_, &backup_loop_})
    loop->post([how_long] { std::this_thread::sleep_for(how_long); });
}

}  // namespace torchft_ext
