#include "peers/peer_monitor.h"

#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include "peers/monitor_core.h"
#include "peers/relay.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kOpenWithin{10};
constexpr std::chrono::seconds kDestroyWithin{1};

// Unless the monitor has stopped.
void tell(LoopDoor& door, const std::weak_ptr<MonitorCore>& core,
          std::function<void(MonitorCore&)> call) {
  door.post([core, call = std::move(call)] {
    if (const auto held = core.lock()) call(*held);
  });
}

LineTableOptions mainTable(const MonitorOptions& monitor, std::shared_ptr<std::atomic<int>> lines) {
  LineTableOptions options;
  options.kind = LineKind::kMain;
  options.self = monitor.self;
  options.bind_address = monitor.bind_address;
  options.ports = monitor.ports;
  options.heartbeat_limit = monitor.heartbeat_limit;
  options.idle_grace = monitor.idle_line_grace;
  options.lines = std::move(lines);
  return options;
}

LineTableOptions witnessTable(const MonitorOptions& monitor,
                              std::shared_ptr<std::atomic<int>> lines) {
  LineTableOptions options = mainTable(monitor, std::move(lines));
  options.kind = LineKind::kWitness;
  options.heartbeat_limit = Duration(0);  // no beats are asked for
  return options;
}

}  // namespace

PeerMonitor::Watch::Watch(std::shared_ptr<LoopDoor> door, std::weak_ptr<MonitorCore> core,
                          uint64_t id)
    : door_(std::move(door)), core_(std::move(core)), id_(id) {}

PeerMonitor::Watch::~Watch() {
  tell(*door_, core_, [id = id_](MonitorCore& core) { core.removeWatch(id); });
}

void PeerMonitor::Watch::peerLeft(int rank) {
  tell(*door_, core_, [id = id_, rank](MonitorCore& core) { core.peerLeft(id, rank); });
}

void PeerMonitor::Watch::announce(const Failure& failure) {
  tell(*door_, core_, [id = id_, failure](MonitorCore& core) { core.announce(id, failure); });
}

PeerMonitor::PeerMonitor(const MonitorOptions& options)
    : main_loop_("ft-monitor", LoopTraits{true, true}),
      witness_loop_("ft-witness", LoopTraits{true, true}),
      relay_(std::make_shared<Relay>(main_loop_.isRealtime())),
      main_door_(std::make_shared<LoopDoor>(main_loop_)),
      witness_door_(std::make_shared<LoopDoor>(witness_loop_)),
      witness_(std::make_shared<WitnessLines>()),
      core_(std::make_shared<MonitorCore>(main_loop_, options, relay_, witness_door_, witness_)) {}

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
  const auto witness = std::make_shared<Opening>();
  const bool main_answered = main_loop_.runOnLoop(
      [main, core = core_, table = mainTable(options, main_lines_)] {
        if (core->open(table, &main->error)) main->address = core->address();
      },
      deadline);
  auto on_report = [relay = relay_, door = main_door_,
                    core = std::weak_ptr(core_)](const LineReport& report) {
    using What = LineReport::What;
    // No beats are asked for on witness lines, and notices go along main lines.
    if (report.what == What::kHeard || report.what == What::kNotice) return;
    relay->post(door, [core, report] {
      if (const auto held = core.lock()) held->onReport(report);
    });
  };
  const bool witness_answered = witness_loop_.runOnLoop(
      [witness, lines = witness_, table = witnessTable(options, witness_lines_), on_report,
       loop = &witness_loop_] {
        lines->table = LineTable::open(*loop, table, on_report, &witness->error);
        if (lines->table) witness->address = lines->table->address();
      },
      deadline);
  std::string why;
  if (!main_answered || !witness_answered) {
    why = "its threads do not answer";
  } else {
    addresses_ = {main->address, witness->address};
    why = main->error.empty() ? witness->error : main->error;
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
  auto handle = std::make_unique<Watch>(main_door_, core_, request->id);
  tell(*main_door_, core_, [request](MonitorCore& core) { core.addWatch(std::move(*request)); });
  return handle;
}

MonitorStats PeerMonitor::stats() const {
  const SentryCounts counts = core_->counts();
  MonitorStats stats;
  stats.private_tables = main_loop_.hasPrivateTable() && witness_loop_.hasPrivateTable();
  stats.realtime = main_loop_.isRealtime() && witness_loop_.isRealtime();
  stats.lines = main_lines_->load(std::memory_order_relaxed) +
                witness_lines_->load(std::memory_order_relaxed);
  stats.watches = counts.detector.watches;
  stats.deaths = counts.detector.deaths;
  stats.freezes = counts.detector.freezes;
  stats.lost_links = counts.detector.lost_links;
  stats.notices_sent = counts.notices_sent;
  stats.notices_heard = counts.notices_heard;
  return stats;
}

bool PeerMonitor::stop(Deadline deadline) {
  main_door_->close();
  witness_door_->close();
  main_loop_.runOnLoop([core = core_] { core->leave(); }, deadline);
  witness_loop_.runOnLoop(
      [lines = witness_] {
        if (lines->table) lines->table->leave();
        lines->table.reset();
      },
      deadline);
  const bool main_ended = main_loop_.stop(deadline);
  const bool witness_ended = witness_loop_.stop(deadline);
  return relay_->stop(deadline) && main_ended && witness_ended;
}

void PeerMonitor::cutLineForTest(const Incarnation& peer) {
  tell(*main_door_, core_, [peer](MonitorCore& core) { core.cutForTest(peer); });
}

void PeerMonitor::holdUpForTest(Duration how_long) {
  for (EventLoop* loop : {&main_loop_, &witness_loop_})
    loop->post([how_long] { std::this_thread::sleep_for(how_long); });
}

}  // namespace torchft_ext
