#include "liveness/liveness_table.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace torchft_ext {
namespace {

using std::chrono::seconds;

constexpr milliseconds kFirstPause{10};
constexpr milliseconds kLongestPause{1000};
constexpr milliseconds kShortestBeat{20};
// Several times in the second of silence after which a peer is warned about.
constexpr milliseconds kLongestBeat{300};
constexpr int kBeatsPerLimit = 5;
// An unanswered dial is parked at the peer's listener (Listener::kParkedFor at most) until its
// generation begins there.
constexpr seconds kConnectWithin{5};
constexpr seconds kAnswerWithin{20};
constexpr seconds kConfirmWithin{10};
constexpr seconds kCloseWithin{10};
constexpr size_t kMostUnconfirmed = 4;
constexpr milliseconds kFirstProbePause{1};

Duration nextPause(Duration pause) {
  return pause == Duration::zero() ? Duration(kFirstPause)
                                   : std::min<Duration>(pause * 2, kLongestPause);
}

// Something may cut connections, so one that ends without a word is no answer here: if a process
// ends, the next one is refused.
ProbePatience patienceFor(const ProbeOrder& order) {
  ProbePatience patience;
  patience.connect = order.connect;
  patience.answer = order.answer;
  patience.first_pause = kFirstProbePause;
  patience.longest_pause = kLongestPause;
  patience.breaks_for_gone = 0;
  return patience;
}

Duration beatPause(Duration limit) {
  return std::clamp<Duration>(limit / kBeatsPerLimit, kShortestBeat, kLongestBeat);
}

}  // namespace

LivenessTable::LivenessTable(EventLoop& loop, const LivenessTableOptions& options,
                             OnReport on_report)
    : loop_(loop),
      options_(options),
      on_report_(std::move(on_report)),
      self_(std::make_shared<LivenessTable*>(this)) {}

std::unique_ptr<LivenessTable> LivenessTable::open(EventLoop& loop,
                                                   const LivenessTableOptions& options,
                                                   OnReport on_report, std::string* error) {
  std::unique_ptr<LivenessTable> table(new LivenessTable(loop, options, std::move(on_report)));
  table->acceptor_ = Listener::open(loop, options.bind_address, options.ports, error, options.self);
  if (!table->acceptor_) return nullptr;
  table->acceptor_->expect(kProbeNonce, GenerationSecret{}, [](Arrival&) { return false; });
  return table;
}

LivenessTable::~LivenessTable() {
  self_.reset();
  acceptor_.reset();
  loop_.cancel(beat_timer_);
  for (auto& [id, peer] : peers_) dropPeer(peer);
}

LivenessTable::PeerEntry* LivenessTable::find(const Incarnation& id) {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : &found->second;
}

EventLoop::TimerId LivenessTable::runAfter(Duration delay, std::function<void()> task) {
  return loop_.runAt(Clock::now() + delay, [weak = std::weak_ptr(self_), task = std::move(task)] {
    if (weak.lock()) task();
  });
}

void LivenessTable::expect(const Nonce& nonce, const GenerationSecret& secret) {
  if (expected_[nonce]++ > 0) return;
  acceptor_->expect(nonce, secret, [weak = std::weak_ptr(self_)](Arrival& arrival) {
    const auto self = weak.lock();
    return self && (*self)->admit(arrival);
  });
}

void LivenessTable::forget(const Nonce& nonce) {
  const auto found = expected_.find(nonce);
  if (found == expected_.end() || --found->second > 0) return;
  expected_.erase(found);
  acceptor_->forget(nonce);
}

void LivenessTable::want(const LivenessRequest& wish) {
  PeerEntry& peer = peers_[wish.peer];
  peer.address = wish.address;
  loop_.cancel(std::exchange(peer.grace, 0));
  Wish& kept = peer.wishes[wish.watch];
  kept.what = wish;
  if (peer.connection) {
    runAfter(Duration::zero(), [this, id = wish.peer] {
      const PeerEntry* standing = find(id);
      if (standing != nullptr && standing->connection) report(ConnectionReport::What::kUp, id);
    });
  } else {
    dialAll(wish.peer);
  }
}

void LivenessTable::unwant(const Incarnation& id, uint64_t watch) {
  PeerEntry* peer = find(id);
  if (peer == nullptr) return;
  const auto wish = peer->wishes.find(watch);
  if (wish == peer->wishes.end()) return;
  dropDial(loop_, wish->second);
  peer->wishes.erase(wish);
  if (!peer->wishes.empty()) return;
  peer->probe.reset();
  if (peer->connection) startGrace(id, *peer);
  forgetIfUnused(id);
}

// Dials: the connecting end of an absent connection.

void LivenessTable::startDial(const Incarnation& id, Wish& wish) {
  const LivenessRequest& what = wish.what;
  Hello hello;
  hello.nonce = what.nonce;
  hello.proof = what.secret.connector;
  hello.from = options_.self;
  hello.to = id;
  hello.rank = what.self_rank;
  hello.channel = static_cast<uint8_t>(options_.kind);
  const Welcome expected{what.secret.acceptor, id};
  wish.dial =
      std::make_unique<Dial>(loop_, what.address, hello, expected, Deadline::after(kConnectWithin),
                             kAnswerWithin, [this, id, watch = what.watch](Dial::Result result) {
                               onDialled(id, watch, std::move(result));
                             });
}

void LivenessTable::dialAll(const Incarnation& id) {
  PeerEntry* peer = find(id);
  if (peer == nullptr || peer->connection || !peer->unconfirmed.empty() || !connectsTo(id)) return;
  for (auto& [watch, wish] : peer->wishes) {
    if (!wish.dial && wish.retry == 0) startDial(id, wish);
  }
}

void LivenessTable::onDialled(const Incarnation& id, uint64_t watch, Dial::Result result) {
  PeerEntry& peer = peers_.at(id);  // a dial never outlives its wish
  Wish& wish = peer.wishes.at(watch);
  const std::unique_ptr<Dial> spent = std::move(wish.dial);
  if (result.end == Dial::End::kWelcomed) {
    dropDials(peer);
    return holdUnconfirmed(id, std::move(result.fd));
  }
  if (result.end == Dial::End::kAnswered && result.code == RefusalCode::kWrongSecret) {
    return log(LogLevel::kWarning, "peer monitor: rank " + std::to_string(wish.what.self_rank) +
                                       " was refused a liveness connection by " +
                                       wish.what.address.toString() + ": " + result.detail +
                                       "; its death will not be noticed early");
  }
  redialLater(id);
  if (livenessShownBy(result) == Liveness::kGone) reportProbe(id, Liveness::kGone, 0);
}

// Those whose dial is neither under way nor waiting.
void LivenessTable::redialLater(const Incarnation& id) {
  PeerEntry* peer = find(id);
  if (peer == nullptr || peer->connection || !connectsTo(id)) return;
  for (auto& [watch, wish] : peer->wishes) {
    if (wish.dial || wish.retry != 0) continue;
    wish.pause = nextPause(wish.pause);
    wish.retry = runAfter(wish.pause, [this, id, number = watch] {
      peers_.at(id).wishes.at(number).retry = 0;
      dialAll(id);
    });
  }
}

void LivenessTable::dropDials(PeerEntry& peer) {
  for (auto& [watch, wish] : peer.wishes) dropDial(loop_, wish);
}

void LivenessTable::dropDial(EventLoop& loop, Wish& wish) {
  wish.dial.reset();
  loop.cancel(std::exchange(wish.retry, 0));
}

// Connections that passed the handshake, at either end, and wait for the first beat.

bool LivenessTable::admit(Arrival& arrival) {
  if (arrival.channel != static_cast<int>(options_.kind)) return false;
  if (!(arrival.from > options_.self)) return false;
  const PeerEntry* peer = find(arrival.from);
  if (peer != nullptr && peer->unconfirmed.size() >= kMostUnconfirmed) return false;
  holdUnconfirmed(arrival.from, std::move(arrival.fd));
  return true;
}

void LivenessTable::holdUnconfirmed(const Incarnation& id, UniqueFd fd) {
  auto connection = std::make_unique<LivenessConnection>(loop_, std::move(fd));
  const uint64_t number = next_passing_++;
  connection->listen([this, id, number](const LivenessConnection::Updates& updates) {
    onUnconfirmed(id, number, updates);
  });
  if (connectsTo(id)) connection->beat(options_.heartbeat_limit);
  Passing& kept = peers_[id].unconfirmed[number];
  kept.connection = std::move(connection);
  kept.drop = runAfter(kConfirmWithin, [this, id, number] { onConfirmTimeout(id, number); });
}

void LivenessTable::onUnconfirmed(const Incarnation& id, uint64_t number,
                                  const LivenessConnection::Updates& updates) {
  if (!updates.beat && !updates.end) return;  // a part of the first beat
  PeerEntry& peer = peers_.at(id);
  std::unique_ptr<LivenessConnection> connection =
      std::move(peer.unconfirmed.at(number).connection);
  drop(peer.unconfirmed, number);
  if (updates.beat) {
    stand(id, std::move(connection));
    if (updates.end || !updates.notices.empty()) onUpdates(id, updates);
  } else {
    redialLater(id);
  }
  forgetIfUnused(id);
}

// The other end may hold it for confirmed: so it is told that this is no death.
void LivenessTable::onConfirmTimeout(const Incarnation& id, uint64_t number) {
  PeerEntry& peer = peers_.at(id);
  peer.unconfirmed.at(number).connection->sayGoodbye(false);
  drop(peer.unconfirmed, number);
  redialLater(id);
  forgetIfUnused(id);
}

void LivenessTable::drop(std::map<uint64_t, Passing>& connections, uint64_t number) {
  const auto found = connections.find(number);
  if (found == connections.end()) return;
  loop_.cancel(found->second.drop);
  connections.erase(found);
}

// Standing connections.

void LivenessTable::stand(const Incarnation& id, std::unique_ptr<LivenessConnection> connection) {
  PeerEntry& peer = peers_.at(id);
  takeConnection(peer);
  dropDials(peer);
  for (auto& [watch, wish] : peer.wishes) wish.pause = Duration::zero();
  peer.connection = std::move(connection);
  options_.connections->fetch_add(1, std::memory_order_relaxed);
  peer.connection->listen(
      [this, id](const LivenessConnection::Updates& updates) { onUpdates(id, updates); });
  peer.connection->beat(options_.heartbeat_limit);
  considerBeats(*peer.connection);
  if (peer.wishes.empty()) startGrace(id, peer);
  report(ConnectionReport::What::kUp, id);
}

void LivenessTable::onUpdates(const Incarnation& id, const LivenessConnection::Updates& updates) {
  PeerEntry& peer = peers_.at(id);
  if (updates.beat && peer.connection) considerBeats(*peer.connection);
  if (updates.heard && !updates.end) report(ConnectionReport::What::kHeard, id);
  reportNotices(id, updates.notices);
  if (updates.end) endConnection(id, *updates.end);
}

void LivenessTable::endConnection(const Incarnation& id, LivenessEnd end) {
  PeerEntry* peer = find(id);
  if (peer == nullptr || !peer->connection) return;  // ended by what the notices led to
  const std::unique_ptr<LivenessConnection> ended = takeConnection(*peer);
  loop_.cancel(std::exchange(peer->grace, 0));
  ConnectionReport over{ConnectionReport::What::kEnded, options_.kind, id};
  over.end = end;
  on_report_(over);
  dialAll(id);
  forgetIfUnused(id);
}

std::unique_ptr<LivenessConnection> LivenessTable::takeConnection(PeerEntry& peer) {
  if (peer.connection) options_.connections->fetch_sub(1, std::memory_order_relaxed);
  return std::move(peer.connection);
}

void LivenessTable::startGrace(const Incarnation& id, PeerEntry& peer) {
  if (!connectsTo(id) || peer.grace != 0) return;
  peer.grace = runAfter(options_.idle_grace, [this, id] { onGraceOver(id); });
}

void LivenessTable::onGraceOver(const Incarnation& id) {
  PeerEntry* peer = find(id);
  if (peer == nullptr) return;
  peer->grace = 0;
  if (!peer->wishes.empty()) return;
  if (std::unique_ptr<LivenessConnection> connection = takeConnection(*peer))
    closeInPeace(id, std::move(connection));
  forgetIfUnused(id);
}

// The other end may be telling something at this moment, and count it as told.
void LivenessTable::closeInPeace(const Incarnation& id,
                                 std::unique_ptr<LivenessConnection> connection) {
  const uint64_t number = next_passing_++;
  connection->listen([this, id, number](const LivenessConnection::Updates& updates) {
    onClosing(id, number, updates);
  });
  connection->sayNotNeeded();
  Passing& kept = peers_.at(id).closing[number];
  kept.connection = std::move(connection);
  kept.drop = runAfter(kCloseWithin, [this, id, number] {
    drop(peers_.at(id).closing, number);
    forgetIfUnused(id);
  });
}

void LivenessTable::onClosing(const Incarnation& id, uint64_t number,
                              const LivenessConnection::Updates& updates) {
  if (updates.end) drop(peers_.at(id).closing, number);
  reportNotices(id, updates.notices);
  forgetIfUnused(id);
}

void LivenessTable::forgetIfUnused(const Incarnation& id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  PeerEntry& peer = found->second;
  if (!peer.wishes.empty() || peer.connection) return;
  if (!peer.unconfirmed.empty() || !peer.closing.empty()) return;
  dropPeer(peer);
  peers_.erase(found);
}

void LivenessTable::dropPeer(PeerEntry& peer) {
  dropDials(peer);
  for (auto& [number, unconfirmed] : peer.unconfirmed) loop_.cancel(unconfirmed.drop);
  for (auto& [number, closing] : peer.closing) loop_.cancel(closing.drop);
  peer.unconfirmed.clear();
  peer.closing.clear();
  loop_.cancel(std::exchange(peer.grace, 0));
  peer.probe.reset();
  takeConnection(peer);
}

bool LivenessTable::tell(const Incarnation& id, const Notice& notice) {
  const PeerEntry* peer = find(id);
  return peer != nullptr && peer->connection && peer->connection->tell(notice);
}

void LivenessTable::accuse(const Incarnation& id, const std::string& why) {
  PeerEntry* peer = find(id);
  if (peer == nullptr) return;
  if (const std::unique_ptr<LivenessConnection> connection = takeConnection(*peer))
    connection->sayDeclaredDead(why);
  loop_.cancel(std::exchange(peer->grace, 0));
  forgetIfUnused(id);
}

void LivenessTable::leave() {
  for (auto& [id, peer] : peers_) {
    if (const std::unique_ptr<LivenessConnection> connection = takeConnection(peer))
      connection->sayGoodbye(true);
    // The other end may hold these for confirmed.
    for (auto& [number, unconfirmed] : peer.unconfirmed) unconfirmed.connection->sayGoodbye(true);
    dropPeer(peer);
  }
  peers_.clear();
}

void LivenessTable::cutForTest(const Incarnation& id) {
  const PeerEntry* peer = find(id);
  if (peer != nullptr && peer->connection) peer->connection->cutForTest();
}

// Heartbeats: every connection at the pace of the most demanding one.

void LivenessTable::considerBeats(const LivenessConnection& connection) {
  if (connection.peerLimit() == Duration::zero()) return;
  const Duration pause = beatPause(connection.peerLimit());
  if (beat_timer_ != 0 && beat_due_ <= Clock::now() + pause) return;
  loop_.cancel(beat_timer_);
  beat_due_ = Clock::now() + pause;
  beat_timer_ = runAfter(pause, [this] { beatAll(); });
}

void LivenessTable::beatAll() {
  beat_timer_ = 0;
  for (auto& [id, peer] : peers_) {
    if (!peer.connection) continue;
    considerBeats(*peer.connection);
    if (peer.connection->peerLimit() > Duration::zero())
      peer.connection->beat(options_.heartbeat_limit);
  }
}

// Probes.

void LivenessTable::probe(const Incarnation& id, const ProbeOrder& order) {
  PeerEntry* peer = find(id);
  if (peer == nullptr || peer->wishes.empty()) return;
  const ProbeQuestion question{
      options_.self, id, {peer->address}, static_cast<uint8_t>(options_.kind)};
  peer->probe.reset();  // its socket first
  peer->probe =
      std::make_unique<Probe>(loop_, question, patienceFor(order),
                              [this, id, number = order.number](const ProbeAnswer& answer) {
                                peers_.at(id).probe.reset();
                                reportProbe(id, answer.liveness, number);
                              });
}

// Reports.

void LivenessTable::report(ConnectionReport::What what, const Incarnation& id) {
  on_report_({what, options_.kind, id});
}

void LivenessTable::reportProbe(const Incarnation& id, Liveness answer, uint64_t number) {
  ConnectionReport probed{ConnectionReport::What::kProbed, options_.kind, id};
  probed.answer = answer;
  probed.number = number;
  on_report_(probed);
}

void LivenessTable::reportNotices(const Incarnation& id, const std::vector<Notice>& notices) {
  for (const Notice& notice : notices)
    on_report_({ConnectionReport::What::kNotice, options_.kind, id, notice});
}

}  // namespace torchft_ext
