// The monitor's part that lives on its loop: ties the orders of failure propagation to the two
// connection tables, and the tables' reports to the failure propagation.
//
// Owner: PeerMonitor; tasks on the loops hold weak_ptrs. Threads: the monitor's loop only. It talks
// to the backup thread's loop, and to the watches' owners, through the hand-off thread. After
// leave() it ignores everything. Never blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "liveness/failure_propagation.h"
#include "liveness/hand_off_thread.h"
#include "liveness/liveness_table.h"
#include "liveness/peer_monitor.h"
#include "net/event_loop.h"

namespace torchft_ext {

// The table of the backup connections: null until it is opened, and when the backup has left.
// Threads: the backup thread's loop only.
struct BackupConnections {
  std::unique_ptr<LivenessTable> table;
};

class MonitorCore : private PropagationOrders {
 public:
  struct WatchRequest {
    WatchId id = 0;
    Nonce nonce;
    GenerationSecret secret;
    int self_rank = -1;
    std::vector<MonitoredPeer> peers;
    PeerMonitor::OnFailure on_failure;
  };

  MonitorCore(EventLoop& loop, const MonitorOptions& options,
              std::shared_ptr<HandOffThread> hand_off, std::shared_ptr<LoopHandle> backup_handle,
              std::shared_ptr<BackupConnections> backup);

  bool open(const LivenessTableOptions& options, std::string* error);
  const SocketAddress& address() const { return table_->address(); }
  void leave();

  void addWatch(WatchRequest request);
  void removeWatch(WatchId id);
  void peerLeft(WatchId id, int rank);
  void announce(WatchId id, const Failure& failure);
  void cutForTest(const Incarnation& peer);

  void onReport(const ConnectionReport& report);  // of either table

  PropagationCounts counts() const;  // any thread

 private:
  struct WatchEntry {
    Nonce nonce;
    GenerationSecret secret;
    int self_rank = -1;
    std::map<Incarnation, std::vector<SocketAddress>> addresses;
    PeerMonitor::OnFailure on_failure;
  };

  std::vector<WatchedPeer> watchable(const WatchRequest& request) const;
  std::optional<LivenessRequest> wishFor(WatchId watch, const Incarnation& peer,
                                         LivenessKind kind) const;
  void fail(WatchId watch, Failure failure) override;
  bool send(const Incarnation& to, const Notice& notice) override;
  void retire(WatchId watch) override;
  void wantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) override;
  void unwantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) override;
  void probe(const Incarnation& peer, LivenessKind kind, const ProbeOrder& order) override;
  void accuse(const Incarnation& peer, const std::string& why) override;
  void warn(const std::string& text) override;
  std::string processState(const std::string& host, int64_t pid) override;
  void askBackup(std::function<void(LivenessTable&)> call);  // later, or never once it has left
  void dropElsewhere(WatchEntry& watch);
  void afterChange();
  void publish();  // the counts
  void onTick();

  const Incarnation incarnation_;
  EventLoop& loop_;
  const std::string host_;
  const std::shared_ptr<HandOffThread> hand_off_;
  const std::shared_ptr<LoopHandle> backup_handle_;
  const std::shared_ptr<BackupConnections> backup_;
  const std::shared_ptr<MonitorCore*> self_;  // expires with this object: for timers
  FailurePropagation propagation_;
  std::unique_ptr<LivenessTable> table_;  // null before open() and after leave()
  std::map<WatchId, WatchEntry> watches_;
  EventLoop::TimerId timer_ = 0;

  mutable Mutex mutex_;
  PropagationCounts published_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
