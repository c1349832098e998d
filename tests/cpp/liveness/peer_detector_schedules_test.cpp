// The peer monitor's decisions under random schedules: every verdict has to be true, every death
// noticed.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "cpp/liveness/detector_recorder.h"
#include "cpp/support/test_seeds.h"
#include "liveness/detector.h"

namespace torchft_ext {
namespace {

using std::chrono::seconds;

// A world of peers that live, die, freeze, thaw and lose connections at random, and a monitor that
// is itself stopped now and then. What the detector says is compared with what is true.
class World : public Recorder {
 public:
  explicit World(uint32_t seed) : random_(seed) {}

  void run() {
    for (int step = 0; step < 4000; ++step) {
      now_ += milliseconds(5);
      act();
      if (stopped_until_ > now_) continue;
      deliver();
      tick();
    }
    expectDeathsNoticed();
    for (const auto& [id, peers] : watches_) detector_.removeWatch(id);
    EXPECT_EQ(detector_.neighbours(), 0U);
    EXPECT_TRUE(wanted.empty());
  }

  void fail(WatchId watch, Failure failure) override {
    judge(watch, failure);
    Recorder::fail(watch, std::move(failure));
  }
  void wantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) override {
    Recorder::wantConnection(watch, peer, kind);
    if (up_.count({peer, kind}) > 0 || alive(peer)) {
      later(chance(100), [this, peer, kind] { comeUp(peer, kind); });
    }
  }
  void probe(const Incarnation& peer, LivenessKind kind, const ProbeOrder& order) override {
    const bool frozen = frozen_.count(peer) > 0;
    const Duration delay = frozen ? order.answer : Duration(chance(50));
    later(delay, [this, peer, kind, frozen, number = order.number] {
      Liveness answer = frozen ? Liveness::kSilent : Liveness::kAlive;
      if (dead_.count(peer) > 0) answer = Liveness::kGone;
      detector_.probed(now_, peer, kind, answer, number);
    });
  }
  void accuse(const Incarnation& peer, const std::string&) override {
    up_.erase({peer, LivenessKind::kMain});
    up_.erase({peer, LivenessKind::kBackup});
  }
  void warn(const std::string&) override {}

 private:
  static constexpr int kPeers = 12;
  using Event = std::function<void()>;

  milliseconds chance(int most) { return milliseconds(random_() % static_cast<uint32_t>(most)); }
  bool oneIn(uint32_t n) { return random_() % n == 0; }
  Incarnation anyone() { return peerNumber(1 + static_cast<int>(random_() % kPeers)); }
  bool alive(const Incarnation& peer) const {
    return dead_.count(peer) == 0 && frozen_.count(peer) == 0;
  }
  void later(Duration delay, Event event) { events_.emplace(now_ + delay, std::move(event)); }

  void deliver() {
    while (!events_.empty() && events_.begin()->first <= now_) {
      const Event event = std::move(events_.begin()->second);
      events_.erase(events_.begin());
      event();
    }
  }

  void tick() {
    for (const auto& [peer, kind] : up_) {
      if (kind == LivenessKind::kMain && alive(peer) && now_ >= next_beat_[peer]) {
        next_beat_[peer] = now_ + kLimit / 5;
        detector_.heard(now_, peer);
      }
    }
    if (due_ && *due_ <= now_) detector_.tick(now_);
    due_ = detector_.nextDue(now_);
  }

  void act() {
    if (oneIn(20)) beginWatch();
    if (oneIn(25) && !watches_.empty()) endWatch();
    if (oneIn(300)) stopped_until_ = now_ + chance(900);
    const Incarnation peer = anyone();
    if (oneIn(800)) die(peer);
    if (oneIn(500)) freeze(peer);
    if (oneIn(500)) cut(peer);
  }

  void beginWatch() {
    std::vector<WatchedPeer> peers;
    for (int number = 1; number <= kPeers; ++number) {
      const bool room = peers.size() < 4;  // all of them neighbours on the overlay
      if (room && dead_.count(peerNumber(number)) == 0 && oneIn(2))
        peers.push_back(member(number, oneIn(3)));
    }
    const WatchId id = next_watch_++;
    watches_[id] = peers;
    detector_.addWatch(now_, id, 0, peers);
  }

  void endWatch() {
    const auto watch =
        std::next(watches_.begin(), static_cast<std::ptrdiff_t>(random_() % watches_.size()));
    detector_.removeWatch(watch->first);
    watches_.erase(watch);
  }

  void comeUp(const Incarnation& peer, LivenessKind kind) {
    if (!alive(peer)) return;
    up_.insert({peer, kind});
    detector_.connectionUp(now_, peer, kind);
  }

  void breakConnections(const Incarnation& peer) {
    for (const LivenessKind kind : {LivenessKind::kMain, LivenessKind::kBackup}) {
      if (up_.erase({peer, kind}) == 0) continue;
      later(chance(20), [this, peer, kind] {
        detector_.connectionEnded(now_, peer, kind, LivenessEnd::kBroken);
      });
    }
  }

  void die(const Incarnation& peer) {
    dead_.emplace(peer, now_);
    breakConnections(peer);
  }

  void freeze(const Incarnation& peer) {
    if (!alive(peer)) return;
    frozen_.insert(peer);
    ever_frozen_.insert(peer);
    later(chance(2000), [this, peer] { frozen_.erase(peer); });
  }

  void cut(const Incarnation& peer) {
    if (!alive(peer)) return;
    cut_.insert(peer);
    breakConnections(peer);
    later(chance(200), [this, peer] { comeUp(peer, LivenessKind::kMain); });
  }

  void judge(WatchId watch, const Failure& failure) {
    const bool connection = failure.kind == FailureKind::kConnectionLost;
    const int rank = connection ? failure.cause.other_rank : failure.cause.rank;
    const auto& peers = watches_.at(watch);
    EXPECT_TRUE(
        std::any_of(peers.begin(), peers.end(), [rank](const auto& p) { return p.rank == rank; }));
    const Incarnation peer = peerNumber(rank);
    if (connection) {
      EXPECT_EQ(cut_.count(peer), 1U) << "a connection that was never cut: " << rank;
    } else {
      EXPECT_TRUE(dead_.count(peer) > 0 || ever_frozen_.count(peer) > 0)
          << "accused though alive: " << rank;
    }
  }

  // Far longer than any probe or pause between probes.
  void expectDeathsNoticed() {
    for (int step = 0; step < 3000; ++step) {
      now_ += milliseconds(5);
      deliver();
      tick();
    }
    for (const auto& [id, peers] : watches_) {
      for (const WatchedPeer& peer : peers) {
        if (dead_.count(peer.incarnation) > 0) {
          EXPECT_EQ(failures.count(id), 1U) << "watch " << id << " was not told of " << peer.rank;
        }
      }
    }
  }

  std::mt19937 random_;
  Clock::time_point now_{seconds(1000)};
  Clock::time_point stopped_until_{};
  Detector detector_{*this, kLimit, kHost, kPid};
  std::optional<Clock::time_point> due_;
  std::multimap<Clock::time_point, Event> events_;
  std::map<WatchId, std::vector<WatchedPeer>> watches_;
  WatchId next_watch_ = 1;
  std::set<std::pair<Incarnation, LivenessKind>> up_;
  std::map<Incarnation, Clock::time_point> next_beat_;
  std::map<Incarnation, Clock::time_point> dead_;
  std::set<Incarnation> frozen_;
  std::set<Incarnation> ever_frozen_;
  std::set<Incarnation> cut_;
};

TEST(DetectorSchedules, VerdictsAreTrueAndDeathsAreNoticedInAnyOrderOfEvents) {
  forSeeds(kSanitized ? 20 : 200, [](uint32_t seed) { World(seed).run(); });
}

}  // namespace
}  // namespace torchft_ext
