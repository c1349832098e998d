// The monitor's part that lives on its loop: ties the sentry's orders to the two line tables, and
// the tables' reports to the sentry.
//
// Owner: PeerMonitor; tasks on the loops hold weak_ptrs. Threads: the monitor's loop only. It talks
// to the witness's loop, and to the watches' owners, through the relay. After leave() it ignores
// everything. Never blocks.
#pragma once

#include <cstdint>
#include <functional>
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

// The table of the witness lines: null until it is opened, and when the witness has left. Threads:
// the witness's loop only.
struct WitnessLines {
  std::unique_ptr<LineTable> table;
};

class MonitorCore : private SentryOrders {
 public:
  struct WatchRequest {
    WatchId id = 0;
    Nonce nonce;
    GenerationSecret secret;
    int self_rank = -1;
    std::vector<MonitoredPeer> peers;
    PeerMonitor::OnFailure on_failure;
  };

  MonitorCore(EventLoop& loop, const MonitorOptions& options, std::shared_ptr<Relay> relay,
              std::shared_ptr<LoopDoor> witness_door, std::shared_ptr<WitnessLines> witness);

  bool open(const LineTableOptions& options, std::string* error);
  const SocketAddress& address() const { return table_->address(); }
  void leave();

  void addWatch(WatchRequest request);
  void removeWatch(WatchId id);
  void peerLeft(WatchId id, int rank);
  void announce(WatchId id, const Failure& failure);
  void cutForTest(const Incarnation& peer);

  void onReport(const LineReport& report);  // of either table

  SentryCounts counts() const;  // any thread

 private:
  struct Watch {
    Nonce nonce;
    GenerationSecret secret;
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
  void warn(const std::string& line) override;
  std::string processState(const std::string& host, int64_t pid) override;
  void askWitness(std::function<void(LineTable&)> call);  // later, or never once it has left
  void dropElsewhere(Watch& watch);
  void afterChange();
  void publish();  // the counts
  void onTick();

  const Incarnation incarnation_;
  EventLoop& loop_;
  const std::string host_;
  const std::shared_ptr<Relay> relay_;
  const std::shared_ptr<LoopDoor> witness_door_;
  const std::shared_ptr<WitnessLines> witness_;
  const std::shared_ptr<MonitorCore*> self_;  // expires with this object: for timers
  Sentry sentry_;
  std::unique_ptr<LineTable> table_;  // null before open() and after leave()
  std::map<WatchId, Watch> watches_;
  EventLoop::TimerId timer_ = 0;

  mutable Mutex mutex_;
  SentryCounts published_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
