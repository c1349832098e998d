// The liveness lines of one of the monitor's two threads: makes, keeps and ends sockets. It decides
// nothing about deaths: it reports what happened to a line, and what a probe of a peer's port said.
//
// Owner: PeerMonitor, one for the monitor's loop and one for the witness's. Threads: its loop's
// only, construction and destruction included, since the sockets live in that thread's private
// descriptor table. It never blocks. Reports come from the loop's handlers, never from inside a
// call of this class.
//
// A peer is a process (its incarnation), and has at most one line here, however many watches want
// it. The greater incarnation of the two connects, so both ends agree in every generation.
//
//   absent    no line. The connecting end runs a Dial for each watch that wants the line, under
//   that generation's nonce:
//             the first to be welcomed becomes the line and the others are dropped. (Which of
//             several generations the other end has begun cannot be known, so none may stand in for
//             the rest.) A dial that ends otherwise is tried again after 10 ms ... 1 s while the
//             watch wants it. The accepting end waits.
//     welcomed (connecting end)      -> the other dials are dropped, a beat is sent; still
//     unconfirmed arrival  (accepting end)       -> unconfirmed first beat on an unconfirmed   ->
//     standing, in place of one that stands: who connects has just one, so the newest is
//                                       the true one. Both ends send a beat then. Unconfirmed ones
//                                       end without report (dropped dials, refusals that follow the
//                                       welcome), or after 10 s
//     connection refused, or another process answers -> reported as probed(kGone)
//   standing  beats go out as often as the other end asked for. Ends by
//     kGoodbye from the peer         -> absent, ended(kIdle) or ended(kLeft)
//     kFailed from the peer          -> absent, ended(kAccused)
//     end of file, error, bad frame  -> absent, ended(kBroken); who decides what it meant asks for
//     a probe accuse()                       -> absent; kFailed is sent, nothing reported no watch
//     wants it for the grace-> the connecting end says kGoodbye: absent, nothing reported. It reads
//     on until the other end closes too, so that no notice is lost. The accepting end keeps it
// A peer that is absent and not wanted is forgotten.
//
// Probe: a connection to the peer's published port, under a nonce that every listener of a monitor
// knows and always refuses. An answer from that process: kAlive. Connection refused, or another
// process's answer: kGone. No connection within its bound, or only resets: kUnreachable. A
// connection (the kernel's doing) but no answer: kSilent, it is frozen.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/identity.h"
#include "net/dial.h"
#include "net/event_loop.h"
#include "net/listener.h"
#include "net/socket_address.h"
#include "peers/line.h"
#include "peers/line_kind.h"

namespace torchft_ext {

// What a table tells of one line. A value: it may go to another thread.
struct LineReport {
  enum class What : uint8_t { kUp, kHeard, kNotice, kEnded, kProbed };
  What what = What::kUp;
  LineKind kind = LineKind::kMain;
  Incarnation peer;
  Notice notice{};                     // kNotice
  LineEnd end = LineEnd::kBroken;      // kEnded
  ProbeEnd answer = ProbeEnd::kAlive;  // kProbed
  uint64_t number = 0;                 // kProbed: of the order; 0: nobody asked, a dial found it
};

struct LineTableOptions {
  LineKind kind = LineKind::kMain;
  Incarnation self;
  SocketAddress bind_address;
  PortRange ports;
  Duration heartbeat_limit{0};  // what is asked of peers; 0: no beats
  Duration idle_grace = std::chrono::seconds(10);
  std::shared_ptr<std::atomic<int>>
      lines;  // how many stand: written by the table, read by any thread
};

// One watch's need of one peer.
struct LineWish {
  uint64_t watch = 0;
  Incarnation peer;
  SocketAddress address;
  Nonce nonce;
  GenerationSecret secret;
  int self_rank = -1;
};

class LineTable {
 public:
  using OnReport = std::function<void(const LineReport&)>;

  // nullptr and *error when no port can be had.
  static std::unique_ptr<LineTable> open(EventLoop& loop, const LineTableOptions& options,
                                         OnReport on_report, std::string* error);
  ~LineTable();  // closes everything without a word

  const SocketAddress& address() const { return door_->address(); }
  // Admits lines of this generation; counted, so as many forget() as expect().
  void expect(const Nonce& nonce, const GenerationSecret& secret);
  void forget(const Nonce& nonce);
  // Reports lineUp() at the loop's next turn if the line stands already.
  void want(const LineWish& wish);
  void unwant(const Incarnation& peer, uint64_t watch);
  // Of a wanted peer; in place of one under way, whose answer is not reported then.
  void probe(const Incarnation& peer, const ProbeOrder& order);
  // Over the line that stands. False: there is none, or the peer does not read.
  bool tell(const Incarnation& peer, const Notice& notice);
  // Tells the peer that it has been declared dead, and closes its line.
  void accuse(const Incarnation& peer, const std::string& why);
  // This process leaves: says goodbye on all lines and closes them and the port.
  void leave();

  void cutForTest(
      const Incarnation& peer);  // shuts the line's socket down, as a broken network would

 private:
  struct Wish {
    LineWish what;
    std::unique_ptr<Dial> dial;
    EventLoop::TimerId retry = 0;
    Duration pause{0};
  };
  struct ProbeRun {
    std::unique_ptr<Dial> dial;
    ProbeOrder order;
    Deadline give_up = Deadline::never();  // unconnected
    bool was_broken = false;
    EventLoop::TimerId retry = 0;
    Duration pause{0};
  };
  struct Passing {  // a line that does not stand yet, or no more
    std::unique_ptr<Line> line;
    EventLoop::TimerId drop = 0;
  };
  struct Peer {
    SocketAddress address;
    std::map<uint64_t, Wish> wishes;  // by watch
    std::unique_ptr<Line> line;
    std::map<uint64_t, Passing> unconfirmed;
    std::map<uint64_t, Passing> closing;
    std::unique_ptr<ProbeRun> probe;
    EventLoop::TimerId grace = 0;
  };

  LineTable(EventLoop& loop, const LineTableOptions& options, OnReport on_report);
  bool connectsTo(const Incarnation& peer) const { return options_.self > peer; }
  Peer* find(const Incarnation& id);
  EventLoop::TimerId runAfter(Duration delay, std::function<void()> task);

  void startDial(const Incarnation& id, Wish& wish);
  void onDialled(const Incarnation& id, uint64_t watch, Dial::Result result);
  void dialAll(const Incarnation& id);
  void dropDials(Peer& peer);
  static void dropDial(EventLoop& loop, Wish& wish);

  bool admit(Arrival& arrival);
  void holdUnconfirmed(const Incarnation& id, UniqueFd fd);
  void onConfirmTimeout(const Incarnation& id, uint64_t number);
  void redialLater(const Incarnation& id);
  void onUnconfirmed(const Incarnation& id, uint64_t number, const Line::News& news);
  void drop(std::map<uint64_t, Passing>& lines, uint64_t number);

  void stand(const Incarnation& id, std::unique_ptr<Line> line);
  void onNews(const Incarnation& id, const Line::News& news);
  void endLine(const Incarnation& id, LineEnd end);
  std::unique_ptr<Line> takeLine(Peer& peer);
  void dropPeer(Peer& peer);
  void startGrace(const Incarnation& id, Peer& peer);
  void onGraceOver(const Incarnation& id);
  void closeInPeace(const Incarnation& id, std::unique_ptr<Line> line);
  void onClosing(const Incarnation& id, uint64_t number, const Line::News& news);
  void forgetIfUnused(const Incarnation& id);

  void runProbe(const Incarnation& id, ProbeRun& run);
  void onProbed(const Incarnation& id, Dial::Result result);
  void probeAgain(const Incarnation& id, ProbeRun& run);
  void dropProbe(Peer& peer);

  void report(LineReport::What what, const Incarnation& id);
  void reportProbe(const Incarnation& id, ProbeEnd answer, uint64_t number);
  void reportNotices(const Incarnation& id, const std::vector<Notice>& notices);
  void considerBeats(const Line& line);
  void beatAll();

  EventLoop& loop_;
  const LineTableOptions options_;
  const OnReport on_report_;
  std::shared_ptr<LineTable*>
      self_;  // expires with the table: for tasks and timers that outlive it
  std::shared_ptr<Listener> door_;
  std::map<Nonce, int> expected_;
  std::map<Incarnation, Peer> peers_;
  uint64_t next_passing_ = 1;
  EventLoop::TimerId beat_timer_ = 0;
  Clock::time_point beat_due_;
};

}  // namespace torchft_ext
