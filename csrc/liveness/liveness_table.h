// The liveness connections of one of the monitor's two threads: makes, keeps and ends sockets. It
// decides nothing about deaths: it reports what happened to a connection, and what a probe of a
// peer's port said.
//
// Owner: PeerMonitor, one for the monitor's loop and one for the backup thread's. Threads: its
// loop's only, construction and destruction included, since the sockets live in that thread's
// private descriptor table. It never blocks. Reports come from the loop's handlers, never from
// inside a call of this class.
//
// A peer is a process (its incarnation), and has at most one connection here, however many watches
// want it. The greater incarnation of the two connects, so both ends agree in every generation.
//
// clang-format off
//   absent    No connection. The connecting end runs a Dial for each watch that wants one, under
//             that generation's nonce: the first to be welcomed becomes the connection, and the
//             others are dropped. (Which of several generations the other end has begun cannot be
//             known, so none may stand in for the rest.) A dial that ends otherwise is tried again
//             after 10 ms ... 1 s while the watch wants it. The accepting end waits.
//               welcomed (connecting end)        -> unconfirmed; the other dials are dropped, a
//                                                   beat is sent
//               arrival (accepting end)          -> unconfirmed
//               first beat on an unconfirmed one -> standing, in place of one that stands: who
//                                                   connects has just one, so the newest is the
//                                                   true one. Both ends send a beat then
//               connection refused, or another process answers -> reported as probed(kGone)
//             Unconfirmed ones end without report (dropped dials, refusals that follow the
//             welcome), or after 10 s.
//   standing  Beats go out as often as the other end asked for. Ends by
//               kGoodbye from the peer         -> absent, ended(kIdle) or ended(kLeft)
//               kFailed from the peer          -> absent, ended(kAccused)
//               end of file, error, bad frame  -> absent, ended(kBroken); who decides what it meant
//                                                 asks for a probe
//               accuse()                       -> absent; kFailed is sent, nothing reported
//               unwanted for the grace         -> the connecting end says kGoodbye: absent, nothing
//                                                 reported. It reads on until the other end closes
//                                                 too, so that no notice is lost. The accepting end
//                                                 keeps it
// clang-format on
// A peer that is absent and not wanted is forgotten.
//
// Probe (net/probe.h): of the peer's published port. Only resets within the bound for connections
// count as kUnreachable.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/identity.h"
#include "liveness/liveness_connection.h"
#include "liveness/liveness_kind.h"
#include "net/dial.h"
#include "net/event_loop.h"
#include "net/listener.h"
#include "net/probe.h"
#include "net/socket_address.h"

namespace torchft_ext {

// What a table tells of one connection. A value: it may go to another thread.
struct ConnectionReport {
  enum class What : uint8_t { kUp, kHeard, kNotice, kEnded, kProbed };
  What what = What::kUp;
  LivenessKind kind = LivenessKind::kMain;
  Incarnation peer;
  Notice notice{};                         // kNotice
  LivenessEnd end = LivenessEnd::kBroken;  // kEnded
  Liveness answer = Liveness::kAlive;      // kProbed
  uint64_t number = 0;  // kProbed: of the order; 0: nobody asked, a dial found it
};

struct LivenessTableOptions {
  LivenessKind kind = LivenessKind::kMain;
  Incarnation self;
  SocketAddress bind_address;
  PortRange ports;
  Duration heartbeat_limit{0};  // what is asked of peers; 0: no beats
  Duration idle_grace = std::chrono::seconds(10);
  std::shared_ptr<std::atomic<int>>
      connections;  // how many stand: written by the table, read by any thread
};

// One watch's need of one peer.
struct LivenessRequest {
  uint64_t watch = 0;
  Incarnation peer;
  SocketAddress address;
  Nonce nonce;
  GenerationSecret secret;
  int self_rank = -1;
};

class LivenessTable {
 public:
  using OnReport = std::function<void(const ConnectionReport&)>;

  // nullptr and *error when no port can be had.
  static std::unique_ptr<LivenessTable> open(EventLoop& loop, const LivenessTableOptions& options,
                                             OnReport on_report, std::string* error);
  ~LivenessTable();  // closes everything without a word

  const SocketAddress& address() const { return acceptor_->address(); }
  // Admits connections of this generation; counted, so as many forget() as expect().
  void expect(const Nonce& nonce, const GenerationSecret& secret);
  void forget(const Nonce& nonce);
  // Reports connectionUp() at the loop's next turn if the connection stands already.
  void want(const LivenessRequest& wish);
  void unwant(const Incarnation& peer, uint64_t watch);
  // Of a wanted peer; in place of one under way, whose answer is not reported then.
  void probe(const Incarnation& peer, const ProbeOrder& order);
  // Over the connection that stands. False: there is none, or the peer does not read.
  bool tell(const Incarnation& peer, const Notice& notice);
  // Tells the peer that it has been declared dead, and closes its connection.
  void accuse(const Incarnation& peer, const std::string& why);
  // This process leaves: says goodbye on all connections and closes them and the port.
  void leave();

  void cutForTest(
      const Incarnation& peer);  // shuts the connection's socket down, as a broken network would

 private:
  struct Wish {
    LivenessRequest what;
    std::unique_ptr<Dial> dial;
    EventLoop::TimerId retry = 0;
    Duration pause{0};
  };
  struct Passing {  // a connection that does not stand yet, or no more
    std::unique_ptr<LivenessConnection> connection;
    EventLoop::TimerId drop = 0;
  };
  struct PeerEntry {
    SocketAddress address;
    std::map<uint64_t, Wish> wishes;  // by watch
    std::unique_ptr<LivenessConnection> connection;
    std::map<uint64_t, Passing> unconfirmed;
    std::map<uint64_t, Passing> closing;
    std::unique_ptr<Probe> probe;
    EventLoop::TimerId grace = 0;
  };

  LivenessTable(EventLoop& loop, const LivenessTableOptions& options, OnReport on_report);
  bool connectsTo(const Incarnation& peer) const { return options_.self > peer; }
  PeerEntry* find(const Incarnation& id);
  EventLoop::TimerId runAfter(Duration delay, std::function<void()> task);

  void startDial(const Incarnation& id, Wish& wish);
  void onDialled(const Incarnation& id, uint64_t watch, Dial::Result result);
  void dialAll(const Incarnation& id);
  void dropDials(PeerEntry& peer);
  static void dropDial(EventLoop& loop, Wish& wish);

  bool admit(Arrival& arrival);
  void holdUnconfirmed(const Incarnation& id, UniqueFd fd);
  void onConfirmTimeout(const Incarnation& id, uint64_t number);
  void redialLater(const Incarnation& id);
  void onUnconfirmed(const Incarnation& id, uint64_t number,
                     const LivenessConnection::Updates& updates);
  void drop(std::map<uint64_t, Passing>& connections, uint64_t number);

  void stand(const Incarnation& id, std::unique_ptr<LivenessConnection> connection);
  void onUpdates(const Incarnation& id, const LivenessConnection::Updates& updates);
  void endConnection(const Incarnation& id, LivenessEnd end);
  std::unique_ptr<LivenessConnection> takeConnection(PeerEntry& peer);
  void dropPeer(PeerEntry& peer);
  void startGrace(const Incarnation& id, PeerEntry& peer);
  void onGraceOver(const Incarnation& id);
  void closeInPeace(const Incarnation& id, std::unique_ptr<LivenessConnection> connection);
  void onClosing(const Incarnation& id, uint64_t number,
                 const LivenessConnection::Updates& updates);
  void forgetIfUnused(const Incarnation& id);

  void report(ConnectionReport::What what, const Incarnation& id);
  void reportProbe(const Incarnation& id, Liveness answer, uint64_t number);
  void reportNotices(const Incarnation& id, const std::vector<Notice>& notices);
  void considerBeats(const LivenessConnection& connection);
  void beatAll();

  EventLoop& loop_;
  const LivenessTableOptions options_;
  const OnReport on_report_;
  std::shared_ptr<LivenessTable*>
      self_;  // expires with the table: for tasks and timers that outlive it
  std::shared_ptr<Listener> acceptor_;
  std::map<Nonce, int> expected_;
  std::map<Incarnation, PeerEntry> peers_;
  uint64_t next_passing_ = 1;
  EventLoop::TimerId beat_timer_ = 0;
  Clock::time_point beat_due_;
};

}  // namespace torchft_ext
