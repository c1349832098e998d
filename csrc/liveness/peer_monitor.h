// Learns within milliseconds that another process died or froze, and fails the generations it was
// in. One for each host engine (so for each set of network options), however many groups; deaths
// are keyed by incarnation.
//
// A killed process closes its ordinary sockets only after the kernel has freed its memory. So the
// liveness connections live in the private descriptor tables of two threads, `ft-monitor` and
// `ft-backup`: whichever of the two ends first closes its connections at once. Main connections go
// to some 2 log2(n) members of a generation (liveness/overlay.h), backup connections to its two
// ring neighbours. Notices along the main connections tell everybody else, of failures that the
// monitor did not find itself too (announce()). An engine that tells its peers on its own ways as
// well makes them two.
//
// Threads: any, never blocking (posts to the monitor's loop), but for start() and stop(). Owner: a
// host engine. Destruction stops it, within a second.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/identity.h"
#include "net/event_loop.h"
#include "net/socket_address.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

class LoopHandle;
class MonitorCore;
class HandOffThread;
struct BackupConnections;

// A member of a generation as the monitor needs it.
struct MonitoredPeer {
  int rank = -1;
  Incarnation incarnation;
  std::string host;
  int64_t pid = -1;
  std::vector<SocketAddress>
      liveness_addresses;  // [main, backup]; empty: it has no monitor, it is not watched
};

struct MonitorOptions {
  SocketAddress bind_address;  // ip to listen on; the port is ignored
  PortRange ports;
  // A peer that has not been heard of for so long counts as frozen. 0: heartbeats are off
  // (debuggers).
  Duration heartbeat_limit = std::chrono::seconds(5);
  Incarnation self = selfIncarnation();
  std::string host;  // this host's name, to know which peers' /proc can be read
  // A connection that no generation needs any more is kept for so long, since the next generation
  // mostly wants it again.
  Duration idle_connection_grace = std::chrono::seconds(10);
};

struct MonitorStats {
  bool private_tables = false;
  bool realtime = false;
  int connections = 0;
  int watches = 0;
  uint64_t deaths = 0;
  uint64_t freezes = 0;
  uint64_t lost_connections = 0;
  uint64_t notices_sent = 0;
  uint64_t notices_heard = 0;
};

class PeerMonitor {
 public:
  // Called at most once, on the monitor's hand-off thread (which has the process's ordinary
  // descriptors, unlike the other two), with kind and cause set: kPeerLost or kConnectionLost as
  // found here, or whatever another member announced. Must not block.
  using OnFailure = std::function<void(Failure)>;
  // Watching ends when this is destroyed (any thread; a call under way may still finish: capture
  // weak_ptrs). Unless it has failed, that tells the other members that this process leaves the
  // generation.
  class Watch {
   public:
    Watch(std::shared_ptr<LoopHandle> handle, std::weak_ptr<MonitorCore> core, uint64_t id);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    void peerLeft(int rank);  // it said goodbye: its end is no death
    // The generation failed for a reason that the monitor did not report: tells all members (once;
    // the first failure is the one that counts). OnFailure is not called for it.
    void announce(const Failure& failure);

   private:
    const std::shared_ptr<LoopHandle> handle_;
    const std::weak_ptr<MonitorCore> core_;
    const uint64_t id_;
  };

  // nullptr and *error when no listener can be opened.
  static std::shared_ptr<PeerMonitor> start(const MonitorOptions& options, std::string* error);
  ~PeerMonitor();
  PeerMonitor(const PeerMonitor&) = delete;
  PeerMonitor& operator=(const PeerMonitor&) = delete;

  // For this process's record.
  const std::vector<SocketAddress>& livenessAddresses() const { return addresses_; }
  // A generation begins: connections to its neighbours are made where they do not stand yet; a
  // member with a tombstone, or a notice that came ahead, fails it at once. The secret admits the
  // connections between its members. nonce: identifies the generation on the wire.
  std::unique_ptr<Watch> watch(const Nonce& nonce, const GenerationSecret& secret, int self_rank,
                               std::vector<MonitoredPeer> peers, OnFailure on_failure);
  MonitorStats stats() const;
  // Tells all peers that this process leaves, then ends the threads. False: not by the deadline.
  bool stop(Deadline deadline);

  // Shuts down the socket of this process's main connection to the peer, as a broken network would.
  void cutConnectionForTest(const Incarnation& peer);
  // Keeps its threads from everything else for so long.
  void holdUpForTest(Duration how_long);

 private:
  explicit PeerMonitor(const MonitorOptions& options);
  bool open(const MonitorOptions& options, std::string* error);

  std::vector<SocketAddress> addresses_;  // constant after open()
  // How many connections stand.
  const std::shared_ptr<std::atomic<int>> main_connections_ = std::make_shared<std::atomic<int>>(0);
  const std::shared_ptr<std::atomic<int>> backup_connections_ =
      std::make_shared<std::atomic<int>>(0);
  std::atomic<uint64_t> next_watch_{1};
  EventLoop main_loop_;
  EventLoop backup_loop_;
  const std::shared_ptr<HandOffThread> hand_off_;
  const std::shared_ptr<LoopHandle> main_handle_;
  const std::shared_ptr<LoopHandle> backup_handle_;
  const std::shared_ptr<BackupConnections> backup_;
  const std::shared_ptr<MonitorCore> core_;
};

}  // namespace torchft_ext
