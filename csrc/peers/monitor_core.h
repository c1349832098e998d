// The monitor's part that lives on its loop: ties the sentry's orders to the two line tables, and
// the tables' reports to the sentry.
//
// Owner: PeerMonitor's implementation; tasks on the loops hold weak_ptrs. Threads: MonitorCore the
// monitor's loop only, WitnessDesk the witness's loop only; each talks to the other, and to the
// watches' owners, through the relay. After leave() both ignore everything. Never blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "net/event_loop.h"
#include "peers/line_table.h"
#include "peers/peer_monitor.h"
#include "peers/relay.h"
#include "peers/sentry.h"

namespace torchft_ext {

class MonitorCore;

// How the two reach each other.
struct MonitorPaths {
  std::shared_ptr<Relay> relay;
  std::shared_ptr<LoopDoor> main_door;
  std::shared_ptr<LoopDoor> witness_door;
};

// Holds the witness lines and passes on what happens to them.
class WitnessDesk : public LineListener, public std::enable_shared_from_this<WitnessDesk> {
 public:
  WitnessDesk(EventLoop& loop, MonitorPaths paths) : loop_(loop), paths_(std::move(paths)) {}

  bool open(const LineTableOptions& options, std::weak_ptr<MonitorCore> core, std::string* error);
  void leave();
  // Any thread: runs later on the witness's loop, or never after leave().
  void ask(std::function<void(LineTable&)> call);
  const SocketAddress& address() const { return table_->address(); }

  void lineUp(LineKind kind, const Incarnation& peer) override;
  void lineHeard(LineKind kind, const Incarnation& peer) override;
  void noticed(LineKind kind, const Incarnation& peer, const Notice& notice) override;
  void lineEnded(LineKind kind, const Incarnation& peer, LineEnd end) override;
  void probed(LineKind kind, const Incarnation& peer, ProbeEnd end, uint64_t number) override;
  void warn(const std::string& line) override;

 private:
  void tell(std::function<void(MonitorCore&)> call);

  EventLoop& loop_;
  const MonitorPaths paths_;
  std::weak_ptr<MonitorCore> core_;
  std::unique_ptr<LineTable> table_;
};

class MonitorCore : public LineListener, private SentryOrders {
 public:
  struct WatchRequest {
    WatchId id = 0;
    Nonce nonce;
    EpochSecret secret;
    int self_rank = -1;
    std::vector<MonitoredPeer> peers;
    PeerMonitor::OnFailure on_failure;
  };

  MonitorCore(EventLoop& loop, const MonitorOptions& options, std::shared_ptr<Relay> relay,
              std::shared_ptr<WitnessDesk> witness);

  bool open(const LineTableOptions& options, std::string* error);
  const SocketAddress& address() const { return table_->address(); }
  void leave();

  void addWatch(WatchRequest request);
  void removeWatch(WatchId id);
  void peerLeft(WatchId id, int rank);
  void announce(WatchId id, const Failure& failure);
  void cutForTest(const Incarnation& peer);

  SentryCounts counts() const;  // any thread

  void lineUp(LineKind kind, const Incarnation& peer) override;
  void lineHeard(LineKind kind, const Incarnation& peer) override;
  void noticed(LineKind kind, const Incarnation& peer, const Notice& notice) override;
  void lineEnded(LineKind kind, const Incarnation& peer, LineEnd end) override;
  void probed(LineKind kind, const Incarnation& peer, ProbeEnd end, uint64_t number) override;
  void warn(const std::string& line) override;

 private:
  struct Watch {
    Nonce nonce;
    EpochSecret secret;
    int self_rank = -1;
    std::map<Incarnation, std::vector<SocketAddress>> addresses;
    PeerMonitor::OnFailure on_failure;
  };

  std::vector<WatchedPeer> watchable(const WatchRequest& request) const;
  std::optional<LineWish> wishFor(WatchId watch, const Incarnation& peer, LineKind kind) const;
  void fail(WatchId watch, Failure failure) override;
  bool send(const Incarnation& to, const Notice& notice) override;
  void retire(WatchId watch) override;
  void wantLine(WatchId watch, const Incarnation& peer, LineKind kind) override;
  void unwantLine(WatchId watch, const Incarnation& peer, LineKind kind) override;
  void probe(const Incarnation& peer, LineKind kind, const ProbeOrder& order) override;
  void accuse(const Incarnation& peer, const std::string& why) override;
  std::string processState(const std::string& host, int64_t pid) override;
  void dropElsewhere(Watch& watch);
  void afterChange();
  void publish();  // the counts
  void onTick();

  const Incarnation incarnation_;
  EventLoop& loop_;
  const std::string host_;
  const std::shared_ptr<Relay> relay_;
  const std::shared_ptr<WitnessDesk> witness_;
  const std::shared_ptr<MonitorCore*> self_;  // expires with this object: for timers
  Sentry sentry_;
  std::unique_ptr<LineTable> table_;  // null before open() and after leave()
  std::map<WatchId, Watch> watches_;
  EventLoop::TimerId timer_ = 0;

  mutable Mutex mutex_;
  SentryCounts published_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
