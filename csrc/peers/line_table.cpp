#include "peers/line_table.h"

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

Duration nextPause(Duration pause) {
  return pause == Duration::zero() ? Duration(kFirstPause)
                                   : std::min<Duration>(pause * 2, kLongestPause);
}

Duration beatPause(Duration limit) {
  return std::clamp<Duration>(limit / kBeatsPerLimit, kShortestBeat, kLongestBeat);
}

}  // namespace

LineTable::LineTable(EventLoop& loop, const LineTableOptions& options, OnReport on_report)
    : loop_(loop),
      options_(options),
      on_report_(std::move(on_report)),
      self_(std::make_shared<LineTable*>(this)) {}

std::unique_ptr<LineTable> LineTable::open(EventLoop& loop, const LineTableOptions& options,
                                           OnReport on_report, std::string* error) {
  std::unique_ptr<LineTable> table(new LineTable(loop, options, std::move(on_report)));
  table->door_ = Listener::open(loop, options.bind_address, options.ports, error, options.self);
  if (!table->door_) return nullptr;
  table->door_->expect(kProbeNonce, GenerationSecret{}, [](Arrival&) { return false; });
  return table;
}

LineTable::~LineTable() {
  self_.reset();
  door_.reset();
  loop_.cancel(beat_timer_);
  for (auto& [id, peer] : peers_) dropPeer(peer);
}

LineTable::Peer* LineTable::find(const Incarnation& id) {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : &found->second;
}

EventLoop::TimerId LineTable::runAfter(Duration delay, std::function<void()> task) {
  return loop_.runAt(Clock::now() + delay, [weak = std::weak_ptr(self_), task = std::move(task)] {
    if (weak.lock()) task();
  });
}

void LineTable::expect(const Nonce& nonce, const GenerationSecret& secret) {
  if (expected_[nonce]++ > 0) return;
  door_->expect(nonce, secret, [weak = std::weak_ptr(self_)](Arrival& arrival) {
    const auto self = weak.lock();
    return self && (*self)->admit(arrival);
  });
}

void LineTable::forget(const Nonce& nonce) {
  const auto found = expected_.find(nonce);
  if (found == expected_.end() || --found->second > 0) return;
  expected_.erase(found);
  door_->forget(nonce);
}

void LineTable::want(const LineWish& wish) {
  Peer& peer = peers_[wish.peer];
  peer.address = wish.address;
  loop_.cancel(std::exchange(peer.grace, 0));
  Wish& kept = peer.wishes[wish.watch];
  kept.what = wish;
  if (peer.line) {
    runAfter(Duration::zero(), [this, id = wish.peer] {
      const Peer* standing = find(id);
      if (standing != nullptr && standing->line) report(LineReport::What::kUp, id);
    });
  } else {
    dialAll(wish.peer);
  }
}

void LineTable::unwant(const Incarnation& id, uint64_t watch) {
  Peer* peer = find(id);
  if (peer == nullptr) return;
  const auto wish = peer->wishes.find(watch);
  if (wish == peer->wishes.end()) return;
  dropDial(loop_, wish->second);
  peer->wishes.erase(wish);
  if (!peer->wishes.empty()) return;
  dropProbe(*peer);
  if (peer->line) startGrace(id, *peer);
  forgetIfUnused(id);
}

// Dials: the connecting end of an absent line.

void LineTable::startDial(const Incarnation& id, Wish& wish) {
  const LineWish& what = wish.what;
  Hello hello;
  hello.nonce = what.nonce;
  hello.proof = what.secret.connector;
  hello.from = options_.self;
  hello.to = id;
  hello.rank = what.self_rank;
  hello.lane = static_cast<uint8_t>(options_.kind);
  const Welcome expected{what.secret.acceptor, id};
  wish.dial =
      std::make_unique<Dial>(loop_, what.address, hello, expected, Deadline::after(kConnectWithin),
                             kAnswerWithin, [this, id, watch = what.watch](Dial::Result result) {
                               onDialled(id, watch, std::move(result));
                             });
}

void LineTable::dialAll(const Incarnation& id) {
  Peer* peer = find(id);
  if (peer == nullptr || peer->line || !peer->unconfirmed.empty() || !connectsTo(id)) return;
  for (auto& [watch, wish] : peer->wishes) {
    if (!wish.dial && wish.retry == 0) startDial(id, wish);
  }
}

void LineTable::onDialled(const Incarnation& id, uint64_t watch, Dial::Result result) {
  Peer& peer = peers_.at(id);  // a dial never outlives its wish
  Wish& wish = peer.wishes.at(watch);
  const std::unique_ptr<Dial> spent = std::move(wish.dial);
  if (result.end == Dial::End::kWelcomed) {
    dropDials(peer);
    return holdUnconfirmed(id, std::move(result.fd));
  }
  if (result.end == Dial::End::kAnswered && result.code == RefusalCode::kWrongSecret) {
    return log(LogLevel::kWarning, "peer monitor: rank " + std::to_string(wish.what.self_rank) +
                                       " was refused a liveness line by " +
                                       wish.what.address.toString() + ": " + result.detail +
                                       "; its death will not be noticed early");
  }
  redialLater(id);
  if (lifeSignOf(result) == LifeSign::kGone) reportProbe(id, ProbeEnd::kGone, 0);
}

// Those whose dial is neither under way nor waiting.
void LineTable::redialLater(const Incarnation& id) {
  Peer* peer = find(id);
  if (peer == nullptr || peer->line || !connectsTo(id)) return;
  for (auto& [watch, wish] : peer->wishes) {
    if (wish.dial || wish.retry != 0) continue;
    wish.pause = nextPause(wish.pause);
    wish.retry = runAfter(wish.pause, [this, id, number = watch] {
      peers_.at(id).wishes.at(number).retry = 0;
      dialAll(id);
    });
  }
}

void LineTable::dropDials(Peer& peer) {
  for (auto& [watch, wish] : peer.wishes) dropDial(loop_, wish);
}

void LineTable::dropDial(EventLoop& loop, Wish& wish) {
  wish.dial.reset();
  loop.cancel(std::exchange(wish.retry, 0));
}

// Connections that passed the handshake, at either end, and wait for the first beat.

bool LineTable::admit(Arrival& arrival) {
  if (arrival.lane != static_cast<int>(options_.kind)) return false;
  if (!(arrival.from > options_.self)) return false;
  const Peer* peer = find(arrival.from);
  if (peer != nullptr && peer->unconfirmed.size() >= kMostUnconfirmed) return false;
  holdUnconfirmed(arrival.from, std::move(arrival.fd));
  return true;
}

void LineTable::holdUnconfirmed(const Incarnation& id, UniqueFd fd) {
  auto line = std::make_unique<Line>(loop_, std::move(fd));
  const uint64_t number = next_passing_++;
  line->listen([this, id, number](const Line::News& news) { onUnconfirmed(id, number, news); });
  if (connectsTo(id)) line->beat(options_.heartbeat_limit);
  Passing& kept = peers_[id].unconfirmed[number];
  kept.line = std::move(line);
  kept.drop = runAfter(kConfirmWithin, [this, id, number] { onConfirmTimeout(id, number); });
}

void LineTable::onUnconfirmed(const Incarnation& id, uint64_t number, const Line::News& news) {
  if (!news.beat && !news.end) return;  // a part of the first beat
  Peer& peer = peers_.at(id);
  std::unique_ptr<Line> line = std::move(peer.unconfirmed.at(number).line);
  drop(peer.unconfirmed, number);
  if (news.beat) {
    stand(id, std::move(line));
    if (news.end || !news.notices.empty()) onNews(id, news);
  } else {
    redialLater(id);
  }
  forgetIfUnused(id);
}

// The other end may hold it for confirmed: so it is told that this is no death.
void LineTable::onConfirmTimeout(const Incarnation& id, uint64_t number) {
  Peer& peer = peers_.at(id);
  peer.unconfirmed.at(number).line->sayGoodbye(false);
  drop(peer.unconfirmed, number);
  redialLater(id);
  forgetIfUnused(id);
}

void LineTable::drop(std::map<uint64_t, Passing>& lines, uint64_t number) {
  const auto found = lines.find(number);
  if (found == lines.end()) return;
  loop_.cancel(found->second.drop);
  lines.erase(found);
}

// Standing lines.

void LineTable::stand(const Incarnation& id, std::unique_ptr<Line> line) {
  Peer& peer = peers_.at(id);
  takeLine(peer);
  dropDials(peer);
  for (auto& [watch, wish] : peer.wishes) wish.pause = Duration::zero();
  peer.line = std::move(line);
  options_.lines->fetch_add(1, std::memory_order_relaxed);
  peer.line->listen([this, id](const Line::News& news) { onNews(id, news); });
  peer.line->beat(options_.heartbeat_limit);
  considerBeats(*peer.line);
  if (peer.wishes.empty()) startGrace(id, peer);
  report(LineReport::What::kUp, id);
}

void LineTable::onNews(const Incarnation& id, const Line::News& news) {
  Peer& peer = peers_.at(id);
  if (news.beat && peer.line) considerBeats(*peer.line);
  if (news.heard && !news.end) report(LineReport::What::kHeard, id);
  reportNotices(id, news.notices);
  if (news.end) endLine(id, *news.end);
}

void LineTable::endLine(const Incarnation& id, LineEnd end) {
  Peer* peer = find(id);
  if (peer == nullptr || !peer->line) return;  // ended by what the notices led to
  const std::unique_ptr<Line> ended = takeLine(*peer);
  loop_.cancel(std::exchange(peer->grace, 0));
  LineReport over{LineReport::What::kEnded, options_.kind, id};
  over.end = end;
  on_report_(over);
  dialAll(id);
  forgetIfUnused(id);
}

std::unique_ptr<Line> LineTable::takeLine(Peer& peer) {
  if (peer.line) options_.lines->fetch_sub(1, std::memory_order_relaxed);
  return std::move(peer.line);
}

void LineTable::startGrace(const Incarnation& id, Peer& peer) {
  if (!connectsTo(id) || peer.grace != 0) return;
  peer.grace = runAfter(options_.idle_grace, [this, id] { onGraceOver(id); });
}

void LineTable::onGraceOver(const Incarnation& id) {
  Peer* peer = find(id);
  if (peer == nullptr) return;
  peer->grace = 0;
  if (!peer->wishes.empty()) return;
  if (std::unique_ptr<Line> line = takeLine(*peer)) closeInPeace(id, std::move(line));
  forgetIfUnused(id);
}

// The other end may be telling something at this moment, and count it as told.
void LineTable::closeInPeace(const Incarnation& id, std::unique_ptr<Line> line) {
  const uint64_t number = next_passing_++;
  line->listen([this, id, number](const Line::News& news) { onClosing(id, number, news); });
  line->sayNotNeeded();
  Passing& kept = peers_.at(id).closing[number];
  kept.line = std::move(line);
  kept.drop = runAfter(kCloseWithin, [this, id, number] {
    drop(peers_.at(id).closing, number);
    forgetIfUnused(id);
  });
}

void LineTable::onClosing(const Incarnation& id, uint64_t number, const Line::News& news) {
  if (news.end) drop(peers_.at(id).closing, number);
  reportNotices(id, news.notices);
  forgetIfUnused(id);
}

void LineTable::forgetIfUnused(const Incarnation& id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  if (!peer.wishes.empty() || peer.line) return;
  if (!peer.unconfirmed.empty() || !peer.closing.empty()) return;
  dropPeer(peer);
  peers_.erase(found);
}

void LineTable::dropPeer(Peer& peer) {
  dropDials(peer);
  for (auto& [number, unconfirmed] : peer.unconfirmed) loop_.cancel(unconfirmed.drop);
  for (auto& [number, closing] : peer.closing) loop_.cancel(closing.drop);
  peer.unconfirmed.clear();
  peer.closing.clear();
  loop_.cancel(std::exchange(peer.grace, 0));
  dropProbe(peer);
  takeLine(peer);
}

bool LineTable::tell(const Incarnation& id, const Notice& notice) {
  const Peer* peer = find(id);
  return peer != nullptr && peer->line && peer->line->tell(notice);
}

void LineTable::accuse(const Incarnation& id, const std::string& why) {
  Peer* peer = find(id);
  if (peer == nullptr) return;
  if (const std::unique_ptr<Line> line = takeLine(*peer)) line->sayDeclaredDead(why);
  loop_.cancel(std::exchange(peer->grace, 0));
  forgetIfUnused(id);
}

void LineTable::leave() {
  for (auto& [id, peer] : peers_) {
    if (const std::unique_ptr<Line> line = takeLine(peer)) line->sayGoodbye(true);
    // The other end may hold these for confirmed.
    for (auto& [number, unconfirmed] : peer.unconfirmed) unconfirmed.line->sayGoodbye(true);
    dropPeer(peer);
  }
  peers_.clear();
}

void LineTable::cutForTest(const Incarnation& id) {
  const Peer* peer = find(id);
  if (peer != nullptr && peer->line) peer->line->cutForTest();
}

// Heartbeats: every line at the pace of the most demanding one.

void LineTable::considerBeats(const Line& line) {
  if (line.peerLimit() == Duration::zero()) return;
  const Duration pause = beatPause(line.peerLimit());
  if (beat_timer_ != 0 && beat_due_ <= Clock::now() + pause) return;
  loop_.cancel(beat_timer_);
  beat_due_ = Clock::now() + pause;
  beat_timer_ = runAfter(pause, [this] { beatAll(); });
}

void LineTable::beatAll() {
  beat_timer_ = 0;
  for (auto& [id, peer] : peers_) {
    if (!peer.line) continue;
    considerBeats(*peer.line);
    if (peer.line->peerLimit() > Duration::zero()) peer.line->beat(options_.heartbeat_limit);
  }
}

// Probes.

void LineTable::probe(const Incarnation& id, const ProbeOrder& order) {
  Peer* peer = find(id);
  if (peer == nullptr || peer->wishes.empty()) return;
  dropProbe(*peer);
  peer->probe = std::make_unique<ProbeRun>();
  peer->probe->order = order;
  peer->probe->give_up = Deadline::after(order.connect);
  runProbe(id, *peer->probe);
}

void LineTable::runProbe(const Incarnation& id, ProbeRun& run) {
  const Hello hello = lifeQuestion(options_.self, id, static_cast<uint8_t>(options_.kind));
  run.dial = std::make_unique<Dial>(
      loop_, peers_.at(id).address, hello, Welcome{{}, id}, run.give_up, run.order.answer,
      [this, id](Dial::Result result) { onProbed(id, std::move(result)); });
}

void LineTable::onProbed(const Incarnation& id, Dial::Result result) {
  Peer& peer = peers_.at(id);
  ProbeRun& run = *peer.probe;
  const std::unique_ptr<Dial> spent = std::move(run.dial);
  ProbeEnd end = ProbeEnd::kUnreachable;
  switch (lifeSignOf(result)) {
    case LifeSign::kGone:
      end = ProbeEnd::kGone;
      break;
    case LifeSign::kSilent:
      end = ProbeEnd::kSilent;
      break;
    case LifeSign::kAlive:
      end = ProbeEnd::kAlive;
      break;
    case LifeSign::kUnclear:
      if (result.end == Dial::End::kNoSocket) return probeAgain(id, run);
      // A dying process resets connections that its listener had taken, just before it refuses
      // them: a reset, however late, deserves another look.
      if (result.end == Dial::End::kBroken && !std::exchange(run.was_broken, true)) {
        run.give_up = Deadline::after(run.order.connect);
      }
      if (run.give_up.expired()) break;
      return probeAgain(id, run);
  }
  const uint64_t number = run.order.number;
  dropProbe(peer);
  reportProbe(id, end, number);
}

void LineTable::probeAgain(const Incarnation& id, ProbeRun& run) {
  run.pause = run.pause == Duration::zero() ? Duration(milliseconds(1)) : nextPause(run.pause);
  run.retry = runAfter(run.pause, [this, id] {
    ProbeRun& again = *peers_.at(id).probe;
    again.retry = 0;
    runProbe(id, again);
  });
}

void LineTable::dropProbe(Peer& peer) {
  if (!peer.probe) return;
  loop_.cancel(peer.probe->retry);
  peer.probe.reset();
}

// Reports.

void LineTable::report(LineReport::What what, const Incarnation& id) {
  on_report_({what, options_.kind, id});
}

void LineTable::reportProbe(const Incarnation& id, ProbeEnd answer, uint64_t number) {
  LineReport probed{LineReport::What::kProbed, options_.kind, id};
  probed.answer = answer;
  probed.number = number;
  on_report_(probed);
}

void LineTable::reportNotices(const Incarnation& id, const std::vector<Notice>& notices) {
  for (const Notice& notice : notices)
    on_report_({LineReport::What::kNotice, options_.kind, id, notice});
}

}  // namespace torchft_ext
