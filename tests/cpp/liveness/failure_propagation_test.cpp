// One failure propagation among peers that the test plays: what it tells whom, and what it keeps.
#include "liveness/failure_propagation.h"

#include <gtest/gtest.h>

#include "cpp/liveness/detector_recorder.h"

namespace torchft_ext {
namespace {

using std::chrono::seconds;

class Paper : public PropagationOrders {
 public:
  void fail(WatchId watch, Failure failure) override {
    EXPECT_TRUE(failures.emplace(watch, std::move(failure)).second) << "told twice: " << watch;
  }
  bool send(const Incarnation& to, const Notice& notice) override {
    if (connections.count(to) == 0) return false;
    if (notice.type != Notice::Type::kAsk) sent.emplace_back(to, notice);
    return true;
  }
  void retire(WatchId watch) override { retired.push_back(watch); }
  void wantConnection(WatchId watch, const Incarnation& peer, LivenessKind) override {
    wanted.emplace(watch, peer);
  }
  void unwantConnection(WatchId watch, const Incarnation& peer, LivenessKind) override {
    EXPECT_EQ(wanted.erase({watch, peer}), 1U);
  }
  void probe(const Incarnation&, LivenessKind, const ProbeOrder&) override {}
  void accuse(const Incarnation&, const std::string&) override {}
  void warn(const std::string&) override {}
  std::string processState(const std::string&, int64_t) override { return ""; }

  std::set<Incarnation> connections;  // that stand
  std::map<WatchId, Failure> failures;
  std::vector<std::pair<Incarnation, Notice>> sent;
  std::vector<WatchId> retired;
  std::set<std::pair<WatchId, Incarnation>> wanted;
};

class FailurePropagationTest : public ::testing::Test {
 protected:
  // A generation of this process, rank 0, and ranks 1 to `others`.
  void begin(WatchId id, int others) {
    std::vector<WatchedPeer> peers;
    for (int rank = 1; rank <= others; ++rank) peers.push_back(member(rank));
    propagation.addWatch(now, id, nonceOf(id), 0, peers);
  }
  void connectionUp(int peer) {
    orders.connections.insert(peerNumber(peer));
    propagation.connectionUp(now, peerNumber(peer), LivenessKind::kMain);
  }
  void hear(int from, const Notice& notice) { propagation.noticed(now, peerNumber(from), notice); }
  static Nonce nonceOf(WatchId id) {
    Nonce nonce;
    nonce.bytes[0] = static_cast<uint8_t>(id);
    return nonce;
  }
  static Notice failed(WatchId generation, FailureKind kind, int rank) {
    Notice notice;
    notice.type = Notice::Type::kFailed;
    notice.generation = nonceOf(generation);
    notice.failure.kind = kind;
    notice.failure.cause.rank = rank;
    notice.failure.cause.how = "its process ended";
    return notice;
  }
  static Notice deathOf(WatchId generation, int rank) {
    Notice notice = failed(generation, FailureKind::kPeerLost, rank);
    notice.dead = peerNumber(rank);
    return notice;
  }

  Clock::time_point now{seconds(1000)};
  Paper orders;
  FailurePropagation propagation{orders, Duration::zero(), {peerNumber(100), kHost, kPid}};
};

TEST_F(FailurePropagationTest, SendsAFailureOnOnceToAllAndSoConfirmsIt) {
  begin(1, 3);
  for (int peer = 1; peer <= 3; ++peer) connectionUp(peer);
  hear(1, failed(1, FailureKind::kAborted, 2));
  hear(2, failed(1, FailureKind::kAborted, 2));
  EXPECT_EQ(orders.failures.at(1).kind, FailureKind::kAborted);
  ASSERT_EQ(orders.sent.size(), 3U);
  for (int peer = 1; peer <= 3; ++peer) {
    EXPECT_EQ(orders.sent[static_cast<size_t>(peer - 1)].first, peerNumber(peer));
  }
}

TEST_F(FailurePropagationTest, DeathThatIsHeardOfFailsEveryGenerationWithThatProcess) {
  begin(1, 3);
  begin(2, 2);
  begin(3, 1);
  hear(1, deathOf(1, 2));
  EXPECT_EQ(orders.failures.count(1), 1U);
  EXPECT_EQ(orders.failures.at(2).cause.rank, 2);
  EXPECT_EQ(orders.failures.count(3), 0U);
  begin(4, 2);
  EXPECT_EQ(orders.failures.count(4), 1U) << "it stays dead";
}

TEST_F(FailurePropagationTest, FreezeThatIsHeardOfFailsThatGenerationAlone) {
  begin(1, 3);
  begin(2, 3);
  hear(1, failed(1, FailureKind::kPeerLost, 2));
  EXPECT_EQ(orders.failures.count(1), 1U);
  EXPECT_EQ(orders.failures.count(2), 0U);
}

TEST_F(FailurePropagationTest, UpdatesAheadOfAGenerationFailsItWhenItBegins) {
  begin(1, 2);
  hear(1, failed(2, FailureKind::kAborted, 1));
  EXPECT_TRUE(orders.failures.empty());
  begin(2, 2);
  EXPECT_EQ(orders.failures.at(2).cause.rank, 1);
}

TEST_F(FailurePropagationTest, UpdatesBehindAGenerationIsDropped) {
  begin(1, 2);
  propagation.removeWatch(now, 1);
  hear(1, failed(1, FailureKind::kAborted, 1));
  begin(2, 2);
  EXPECT_TRUE(orders.failures.empty());
}

TEST_F(FailurePropagationTest, WhoAsksAboutAPastGenerationIsTold) {
  begin(1, 2);
  connectionUp(1);
  connectionUp(2);
  hear(1, failed(1, FailureKind::kAborted, 1));
  hear(2, failed(1, FailureKind::kAborted, 1));
  propagation.removeWatch(now, 1);
  EXPECT_EQ(orders.retired, std::vector<WatchId>{1});
  orders.sent.clear();
  Notice question;
  question.generation = nonceOf(1);
  hear(2, question);
  ASSERT_EQ(orders.sent.size(), 1U);
  EXPECT_EQ(orders.sent[0].second.failure.kind, FailureKind::kAborted);
}

TEST_F(FailurePropagationTest, ConnectionsToTheUntoldStayWantedUntilTheySayThatTheyKnow) {
  begin(1, 2);
  connectionUp(1);
  propagation.announce(now, 1, failed(1, FailureKind::kTimeout, 0).failure);
  propagation.removeWatch(now, 1);
  EXPECT_TRUE(orders.failures.empty()) << "its owner knows";
  EXPECT_EQ(orders.wanted.size(), 2U);
  EXPECT_TRUE(orders.retired.empty());
  hear(1, failed(1, FailureKind::kTimeout, 0));
  connectionUp(2);
  EXPECT_EQ(orders.sent.back().first, peerNumber(2));
  EXPECT_EQ(orders.wanted.size(), 1U) << "what was sent may not have arrived";
  orders.sent.clear();
  connectionUp(2);
  EXPECT_TRUE(orders.sent.empty()) << "this connection has brought it";
  propagation.connectionEnded(now, peerNumber(2), LivenessKind::kMain, LivenessEnd::kIdle);
  connectionUp(2);
  EXPECT_EQ(orders.sent.size(), 1U) << "told again over the next connection";
  hear(2, failed(1, FailureKind::kTimeout, 0));
  EXPECT_TRUE(orders.wanted.empty());
  EXPECT_EQ(orders.retired, std::vector<WatchId>{1});
  EXPECT_EQ(propagation.generations(), 0U);
}

TEST_F(FailurePropagationTest, ConnectionsToTheUntoldAreGivenUpInTheEnd) {
  begin(1, 2);
  propagation.announce(now, 1, failed(1, FailureKind::kTimeout, 0).failure);
  propagation.removeWatch(now, 1);
  propagation.probed(now, peerNumber(1), LivenessKind::kMain, Liveness::kGone, 0);
  EXPECT_EQ(orders.wanted.size(), 1U) << "who is gone need not be told";
  const auto end = now + OutcomeBroadcast::kKeptFor;
  now += OutcomeBroadcast::kCloseAfter;  // it may have left before
  propagation.tick(now);
  EXPECT_EQ(orders.wanted.size(), 1U);
  ASSERT_EQ(propagation.nextDue(now), end);
  now = end;
  propagation.tick(now);
  EXPECT_TRUE(orders.wanted.empty());
  EXPECT_EQ(orders.retired, std::vector<WatchId>{1});
  EXPECT_EQ(propagation.nextDue(now), std::nullopt);
}

TEST_F(FailurePropagationTest, RingClosesAroundThoseWhoLeftWithoutHavingHeard) {
  begin(1, 7);  // a ring with chords: 0 and 3 are no neighbours
  propagation.announce(now, 1, failed(1, FailureKind::kTimeout, 0).failure);
  propagation.removeWatch(now, 1);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(3)}), 0U);
  Notice leaver;
  leaver.type = Notice::Type::kLeft;
  leaver.generation = nonceOf(1);
  leaver.rank = 2;
  hear(1, leaver);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(2)}), 0U);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(3)}), 0U) << "others may leave with it";
  ASSERT_EQ(propagation.nextDue(now), now + OutcomeBroadcast::kCloseAfter);
  propagation.tick(now + OutcomeBroadcast::kCloseAfter);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(3)}), 1U);
  connectionUp(3);
  EXPECT_EQ(orders.sent.back().first, peerNumber(3));
}

TEST_F(FailurePropagationTest, LeaverThatKnewLeavesTheRingAsItIs) {
  begin(1, 7);
  propagation.announce(now, 1, failed(1, FailureKind::kTimeout, 0).failure);
  hear(2, failed(1, FailureKind::kTimeout, 0));
  Notice leaver;
  leaver.type = Notice::Type::kLeft;
  leaver.generation = nonceOf(1);
  leaver.rank = 2;
  hear(1, leaver);
  EXPECT_EQ(propagation.nextDue(now), now + OutcomeBroadcast::kKeptFor)
      << "for the other neighbours";
}

TEST_F(FailurePropagationTest, RingClosesAroundLeaversWhoseConnectionsAreStillWanted) {
  begin(1, 7);
  propagation.peerLeft(now, 1, 2);
  connectionUp(3);
  propagation.announce(now, 1, failed(1, FailureKind::kTimeout, 0).failure);
  propagation.removeWatch(now, 1);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(3)}), 1U) << "before the time to rewire";
}

TEST_F(FailurePropagationTest, RemovedWatchSaysThatItsMemberLeft) {
  begin(1, 2);
  connectionUp(1);
  connectionUp(2);
  propagation.removeWatch(now, 1);
  ASSERT_EQ(orders.sent.size(), 2U);
  EXPECT_EQ(orders.sent[0].second.type, Notice::Type::kLeft);
  EXPECT_EQ(orders.sent[0].second.rank, 0);
}

TEST_F(FailurePropagationTest, LeaverIsPassedOnOnceAndItsEndIsNoDeath) {
  begin(1, 3);
  for (int peer = 1; peer <= 3; ++peer) connectionUp(peer);
  Notice leaver;
  leaver.type = Notice::Type::kLeft;
  leaver.generation = nonceOf(1);
  leaver.rank = 3;
  hear(3, leaver);
  hear(1, leaver);
  EXPECT_EQ(orders.sent.size(), 2U);
  propagation.probed(now, peerNumber(3), LivenessKind::kMain, Liveness::kGone, 0);
  EXPECT_TRUE(orders.failures.empty());
}

TEST_F(FailurePropagationTest, LateConnectionBringsTheLeaversToo) {
  begin(1, 3);
  propagation.peerLeft(now, 1, 3);
  connectionUp(1);
  Notice question;
  question.generation = nonceOf(1);
  hear(1, question);
  ASSERT_EQ(orders.sent.size(), 1U);
  EXPECT_EQ(orders.sent[0].second.rank, 3);
}

TEST_F(FailurePropagationTest, ProcessThatIsNamedItselfSaysSoInItsOwnWords) {
  begin(1, 2);
  hear(1, failed(1, FailureKind::kPeerLost, 0));
  const Failure& failure = orders.failures.at(1);
  EXPECT_EQ(failure.cause.rank, 0);
  EXPECT_EQ(failure.cause.pid, kPid);
  EXPECT_EQ(failure.cause.how.rfind("this process was frozen and left out", 0), 0U);
}

TEST_F(FailurePropagationTest, RanksOutsideTheGenerationAreNotBelieved) {
  begin(1, 2);
  hear(1, failed(1, FailureKind::kAborted, 3));
  EXPECT_TRUE(orders.failures.empty());
}

}  // namespace
}  // namespace torchft_ext
