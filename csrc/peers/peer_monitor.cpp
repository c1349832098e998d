#include "peers/peer_monitor.h"

#include <atomic>
#include <system_error>
#include <thread>
#include <utility>

#include "net/event_loop.h"
#include "peers/monitor_core.h"
#include "peers/monitor_for_test.h"
#include "peers/relay.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kOpenWithin{10};
constexpr std::chrono::seconds kDestroyWithin{1};

class WatchHandle : public PeerMonitor::Watch {
 public:
  WatchHandle(std::shared_ptr<LoopDoor> door, std::weak_ptr<MonitorCore> core, WatchId id)
      : door_(std::move(door)), core_(std::move(core)), id_(id) {}
  ~WatchHandle() override {
    tell([id = id_](MonitorCore& core) { core.removeWatch(id); });
  }
  WatchHandle(const WatchHandle&) = delete;
  WatchHandle& operator=(const WatchHandle&) = delete;

  void peerLeft(int rank) override {
    tell([id = id_, rank](MonitorCore& core) { core.peerLeft(id, rank); });
  }
  void announce(const Failure& failure) override {
    tell([id = id_, failure](MonitorCore& core) { core.announce(id, failure); });
  }

 private:
  void tell(std::function<void(MonitorCore&)> call) {
    door_->post([weak = core_, call = std::move(call)] {
      if (const auto core = weak.lock()) call(*core);
    });
  }

  const std::shared_ptr<LoopDoor> door_;
  const std::weak_ptr<MonitorCore> core_;
  const WatchId id_;
};

class Monitor final : public PeerMonitor {
 public:
  explicit Monitor(const MonitorOptions& options)
      : options_(options),
        main_loop_("ft-monitor", LoopTraits{true, true}),
        witness_loop_("ft-witness", LoopTraits{true, true}),
        relay_(std::make_shared<Relay>(main_loop_.isRealtime())),
        door_(std::make_shared<LoopDoor>(main_loop_)),
        witness_door_(std::make_shared<LoopDoor>(witness_loop_)),
        witness_(std::make_shared<WitnessDesk>(witness_loop_,
                                               MonitorPaths{relay_, door_, witness_door_})),
        core_(std::make_shared<MonitorCore>(main_loop_, options, relay_, witness_)) {}
  ~Monitor() override { Monitor::stop(Deadline::after(kDestroyWithin)); }
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  bool open(std::string* error);

  std::vector<SocketAddress> lineAddresses() const override { return addresses_; }
  std::unique_ptr<Watch> watch(const Nonce& nonce, const EpochSecret& secret, int self_rank,
                               std::vector<MonitoredPeer> peers, OnFailure on_failure) override;
  MonitorStats stats() const override;
  bool stop(Deadline deadline) override;
  void cutForTest(const Incarnation& peer);
  void holdUpForTest(Duration how_long);

 private:
  LineTableOptions tableOptions(LineKind kind) const;

  // Constant after open().
  const MonitorOptions options_;
  std::vector<SocketAddress> addresses_;

  const std::shared_ptr<std::atomic<int>> main_lines_ = std::make_shared<std::atomic<int>>(0);
  const std::shared_ptr<std::atomic<int>> witness_lines_ = std::make_shared<std::atomic<int>>(0);
  std::atomic<WatchId> next_watch_{1};
  EventLoop main_loop_;
  EventLoop witness_loop_;
  const std::shared_ptr<Relay> relay_;
  const std::shared_ptr<LoopDoor> door_;  // to the main loop
  const std::shared_ptr<LoopDoor> witness_door_;
  const std::shared_ptr<WitnessDesk> witness_;
  const std::shared_ptr<MonitorCore> core_;
};

LineTableOptions Monitor::tableOptions(LineKind kind) const {
  LineTableOptions options;
  options.kind = kind;
  options.self = options_.self;
  options.bind_address = options_.bind_address;
  options.ports = options_.ports;
  options.idle_grace = options_.idle_line_grace;
  options.lines = kind == LineKind::kMain ? main_lines_ : witness_lines_;
  if (kind == LineKind::kMain) options.heartbeat_limit = options_.heartbeat_limit;
  return options;
}

bool Monitor::open(std::string* error) {
  struct Opening {  // shared with the loops, which may come to it too late
    std::string error;
    SocketAddress address;
  };
  const Deadline deadline = Deadline::after(kOpenWithin);
  const auto main = std::make_shared<Opening>();
  const auto witness = std::make_shared<Opening>();
  const bool main_answered = main_loop_.runOnLoop(
      [main, core = core_, options = tableOptions(LineKind::kMain)] {
        if (core->open(options, &main->error)) main->address = core->address();
      },
      deadline);
  const bool witness_answered = witness_loop_.runOnLoop(
      [witness, desk = witness_, core = std::weak_ptr(core_),
       options = tableOptions(LineKind::kWitness)] {
        if (desk->open(options, core, &witness->error)) witness->address = desk->address();
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

std::unique_ptr<PeerMonitor::Watch> Monitor::watch(const Nonce& nonce, const EpochSecret& secret,
                                                   int self_rank, std::vector<MonitoredPeer> peers,
                                                   OnFailure on_failure) {
  auto request = std::make_shared<MonitorCore::WatchRequest>();
  request->id = next_watch_.fetch_add(1, std::memory_order_relaxed);
  request->nonce = nonce;
  request->secret = secret;
  request->self_rank = self_rank;
  request->peers = std::move(peers);
  request->on_failure = std::move(on_failure);
  auto handle = std::make_unique<WatchHandle>(door_, core_, request->id);
  door_->post([weak = std::weak_ptr(core_), request] {
    if (const auto core = weak.lock()) core->addWatch(std::move(*request));
  });
  return handle;
}

MonitorStats Monitor::stats() const {
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

bool Monitor::stop(Deadline deadline) {
  door_->close();
  witness_door_->close();
  main_loop_.runOnLoop([core = core_] { core->leave(); }, deadline);
  witness_loop_.runOnLoop([desk = witness_] { desk->leave(); }, deadline);
  const bool main_ended = main_loop_.stop(deadline);
  const bool witness_ended = witness_loop_.stop(deadline);
  return relay_->stop(deadline) && main_ended && witness_ended;
}

void Monitor::cutForTest(const Incarnation& peer) {
  door_->post([weak = std::weak_ptr(core_), peer] {
    if (const auto core = weak.lock()) core->cutForTest(peer);
  });
}

void Monitor::holdUpForTest(Duration how_long) {
  for (EventLoop* loop : {&main_loop_, &witness_loop_})
    loop->post([how_long] { std::this_thread::sleep_for(how_long); });
}

}  // namespace

std::shared_ptr<PeerMonitor> PeerMonitor::start(const MonitorOptions& options, std::string* error) {
  try {
    auto monitor = std::make_shared<Monitor>(options);
    if (monitor->open(error)) return monitor;
  } catch (const std::system_error& refused) {
    if (error != nullptr) *error = refused.what();
  }
  return nullptr;
}

void holdUpForTest(PeerMonitor& monitor, Duration how_long) {
  dynamic_cast<Monitor&>(monitor).holdUpForTest(how_long);
}

void cutLineForTest(PeerMonitor& monitor, const Incarnation& peer) {
  dynamic_cast<Monitor&>(monitor).cutForTest(peer);
}

}  // namespace torchft_ext
