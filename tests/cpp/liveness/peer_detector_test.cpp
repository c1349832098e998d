// The decisions of the peer monitor, in simulated time: no sockets, no threads, no waiting.
#include <gtest/gtest.h>

#include <algorithm>

#include "cpp/liveness/detector_recorder.h"
#include "liveness/detector.h"

namespace torchft_ext {
namespace {

using std::chrono::seconds;

class DetectorTest : public ::testing::Test {
 protected:
  void begin(WatchId id, const std::vector<WatchedPeer>& peers) {
    detector.addWatch(now, id, 0, peers);
    detector.nextDue(now);
  }
  void beginWithConnection(WatchId id, int peer) {
    begin(id, {member(peer)});
    detector.connectionUp(now, peerNumber(peer), LivenessKind::kMain);
    detector.nextDue(now);
  }
  void breakConnection(int peer, LivenessKind kind = LivenessKind::kMain) {
    detector.connectionEnded(now, peerNumber(peer), kind, LivenessEnd::kBroken);
  }
  void probeSays(int peer, Liveness answer, LivenessKind kind = LivenessKind::kMain) {
    const uint64_t number = orders.lastProbeOf(peerNumber(peer), kind);
    detector.probed(now, peerNumber(peer), kind, answer, number);
  }
  // As the loop does it: a tick whenever one is due.
  void pass(Duration time) {
    const auto until = now + time;
    for (auto due = detector.nextDue(now); due && *due <= until; due = detector.nextDue(now)) {
      now = std::max(now, *due);
      detector.tick(now);
    }
    now = until;
    detector.nextDue(now);
  }

  Clock::time_point now{seconds(1000)};
  Recorder orders;
  Detector detector{orders, kLimit, kHost, kPid};
};

TEST_F(DetectorTest, BrokenConnectionAndClosedPortAreADeath) {
  beginWithConnection(1, 3);
  breakConnection(3);
  ASSERT_EQ(orders.probes.size(), 1U);
  EXPECT_TRUE(orders.failures.empty()) << "judged before the probe had answered";
  probeSays(3, Liveness::kGone);
  const Failure& failure = orders.failures.at(1);
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(failure.cause.rank, 3);
  EXPECT_EQ(failure.cause.host, "there");
  EXPECT_EQ(failure.cause.pid, 1003);
  EXPECT_EQ(failure.cause.how, "its process ended");
  EXPECT_EQ(detector.counts().deaths, 1U);
}

TEST_F(DetectorTest, ProcessThatEndedBeforeItsConnectionStoodMayHaveSaidGoodbye) {
  begin(1, {member(2), member(3)});
  probeSays(3, Liveness::kGone);
  detector.probed(now, peerNumber(3), LivenessKind::kMain, Liveness::kGone, 0);
  EXPECT_TRUE(orders.failures.empty());
  detector.peerLeft(now, 1, 3);
  pass(seconds(1));
  EXPECT_TRUE(orders.failures.empty());
}

TEST_F(DetectorTest, WithoutAGoodbyeItIsADeathAfterAWhile) {
  begin(1, {member(3)});
  detector.probed(now, peerNumber(3), LivenessKind::kMain, Liveness::kGone, 0);
  pass(milliseconds(499));
  probeSays(3, Liveness::kGone);
  EXPECT_TRUE(orders.failures.empty());
  pass(milliseconds(1));
  probeSays(3, Liveness::kGone);
  EXPECT_EQ(orders.failures.at(1).kind, FailureKind::kPeerLost);
}

TEST_F(DetectorTest, BrokenBackupConnectionSaysTheSame) {
  begin(1, {member(3, true)});
  detector.connectionUp(now, peerNumber(3), LivenessKind::kMain);
  detector.connectionUp(now, peerNumber(3), LivenessKind::kBackup);
  breakConnection(3, LivenessKind::kBackup);
  ASSERT_EQ(orders.probes.size(), 1U);
  EXPECT_EQ(orders.probes[0].kind, LivenessKind::kBackup);
  probeSays(3, Liveness::kGone, LivenessKind::kBackup);
  EXPECT_EQ(orders.failures.at(1).kind, FailureKind::kPeerLost);
}

TEST_F(DetectorTest, BrokenConnectionToALivingProcessIsALostConnection) {
  beginWithConnection(1, 3);
  breakConnection(3);
  probeSays(3, Liveness::kAlive);
  const Failure& failure = orders.failures.at(1);
  EXPECT_EQ(failure.kind, FailureKind::kConnectionLost);
  EXPECT_EQ(failure.cause.rank, 0);
  EXPECT_EQ(failure.cause.other_rank, 3);
  EXPECT_EQ(failure.cause.host, kHost);
  EXPECT_EQ(detector.counts().lost_connections, 1U);
  EXPECT_EQ(detector.counts().deaths, 0U);
}

TEST_F(DetectorTest, NewConnectionInPlaceOfABrokenOneIsALostConnectionToo) {
  beginWithConnection(1, 3);
  breakConnection(3);
  detector.connectionUp(now, peerNumber(3), LivenessKind::kMain);
  EXPECT_EQ(orders.failures.at(1).kind, FailureKind::kConnectionLost);
}

TEST_F(DetectorTest, UnreachableHostIsADeath) {
  beginWithConnection(1, 3);
  breakConnection(3);
  EXPECT_EQ(orders.probes[0].order.connect, Duration(kLimit));
  probeSays(3, Liveness::kUnreachable);
  EXPECT_EQ(orders.failures.at(1).cause.how, "its host cannot be reached");
}

TEST_F(DetectorTest, ProcessThatCouldNotBeAskedAboutIsAskedAboutAgain) {
  beginWithConnection(1, 3);
  breakConnection(3);
  probeSays(3, Liveness::kUnknown);
  EXPECT_TRUE(orders.failures.empty());
  ASSERT_EQ(orders.probes.size(), 2U);
  probeSays(3, Liveness::kGone);
  EXPECT_EQ(orders.failures.at(1).kind, FailureKind::kPeerLost);
}

TEST_F(DetectorTest, DeathFailsEveryWatchWithThatProcessAndNoOther) {
  beginWithConnection(1, 3);
  begin(2, {member(2), member(3)});
  begin(3, {member(2)});
  breakConnection(3);
  probeSays(3, Liveness::kGone);
  EXPECT_EQ(orders.failures.count(1), 1U);
  EXPECT_EQ(orders.failures.count(2), 1U);
  EXPECT_EQ(orders.failures.count(3), 0U);
  EXPECT_EQ(detector.counts().deaths, 1U);
  EXPECT_EQ(orders.wanted.size(), 1U) << "a failed watch wants nothing any more";
}

TEST_F(DetectorTest, WatchOnADeadProcessFailsAtOnce) {
  beginWithConnection(1, 3);
  breakConnection(3);
  probeSays(3, Liveness::kGone);
  begin(2, {member(2), member(3)});
  EXPECT_EQ(orders.failures.at(2).cause.rank, 3);
  EXPECT_EQ(orders.failures.at(2).cause.how, "its process ended");
}

TEST_F(DetectorTest, TombstonesDoNotPileUp) {
  beginWithConnection(1, 3);
  breakConnection(3);
  probeSays(3, Liveness::kGone);
  EXPECT_EQ(detector.tombstones(), 1U);
  now += Detector::kTombstoneFor;
  begin(2, {member(2)});
  EXPECT_EQ(detector.tombstones(), 0U);
}

TEST_F(DetectorTest, SilenceForTheLimitIsAFreeze) {
  beginWithConnection(1, 3);
  pass(kLimit - milliseconds(1));
  EXPECT_TRUE(orders.failures.empty());
  pass(milliseconds(2));
  const Failure& failure = orders.failures.at(1);
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(failure.cause.how,
            "its process has not answered for 0.3 s (state T: stopped by a signal)");
  EXPECT_EQ(orders.accused, std::vector{peerNumber(3)}) << "it would not know when it thaws";
  EXPECT_EQ(detector.counts().freezes, 1U);
}

TEST_F(DetectorTest, AnswerToTheQuestionOfAnEarlierWatchSaysNothing) {
  begin(1, {member(3)});
  pass(milliseconds(200));
  const uint64_t early = orders.lastProbeOf(peerNumber(3), LivenessKind::kMain);
  ASSERT_NE(early, 0U);
  detector.removeWatch(1);
  beginWithConnection(2, 3);
  breakConnection(3);
  detector.probed(now, peerNumber(3), LivenessKind::kMain, Liveness::kAlive, early);
  EXPECT_TRUE(orders.failures.empty()) << "it lived before its connection broke";
  probeSays(3, Liveness::kGone);
  EXPECT_EQ(orders.failures.at(2).kind, FailureKind::kPeerLost);
}

TEST_F(DetectorTest, BeatsKeepAPeerAlive) {
  beginWithConnection(1, 3);
  for (int i = 0; i < 100; ++i) {
    pass(kLimit / 2);
    detector.heard(now, peerNumber(3));
  }
  EXPECT_TRUE(orders.failures.empty());
}

TEST_F(DetectorTest, WithoutHeartbeatsSilenceIsNotJudged) {
  Detector patient(orders, Duration::zero(), kHost, kPid);
  patient.addWatch(now, 1, 0, {member(3)});
  patient.connectionUp(now, peerNumber(3), LivenessKind::kMain);
  patient.tick(now + std::chrono::hours(5));
  EXPECT_TRUE(orders.failures.empty());
  patient.connectionEnded(now, peerNumber(3), LivenessKind::kMain, LivenessEnd::kBroken);
  EXPECT_LT(orders.probes.at(0).order.answer, Duration::zero());
  patient.probed(now, peerNumber(3), LivenessKind::kMain, Liveness::kSilent, 1);
  EXPECT_TRUE(orders.failures.empty());
}

TEST_F(DetectorTest, OthersAreAskedForASilentPeerAtHalfTheLimitAndOnce) {
  beginWithConnection(1, 3);
  pass(kLimit / 2 - milliseconds(1));
  EXPECT_TRUE(orders.asked.empty());
  pass(kLimit / 4);
  EXPECT_EQ(orders.asked, std::vector{peerNumber(3)});
  detector.heard(now, peerNumber(3));
  pass(kLimit / 2);
  EXPECT_EQ(orders.asked.size(), 2U) << "another silence";
}

TEST_F(DetectorTest, SilentPeerThatOthersReachIsALostConnection) {
  beginWithConnection(1, 3);
  pass(kLimit * 3 / 4);
  detector.seenElsewhere(peerNumber(3));
  EXPECT_TRUE(orders.failures.empty()) << "it may be heard of here yet";
  pass(kLimit);
  const Failure& failure = orders.failures.at(1);
  EXPECT_EQ(failure.kind, FailureKind::kConnectionLost);
  EXPECT_EQ(failure.cause.rank, 0);
  EXPECT_EQ(failure.cause.other_rank, 3);
  EXPECT_TRUE(orders.accused.empty());
  EXPECT_EQ(detector.tombstones(), 0U);
}

TEST_F(DetectorTest, ThatOthersReachedItBeforeItWasHeardOfAgainSaysNothing) {
  beginWithConnection(1, 3);
  pass(kLimit * 3 / 4);
  detector.seenElsewhere(peerNumber(3));
  detector.heard(now, peerNumber(3));
  detector.seenElsewhere(peerNumber(3));  // late, and nobody was asked since
  pass(kLimit * 2);
  EXPECT_EQ(orders.failures.at(1).kind, FailureKind::kPeerLost);
}

TEST_F(DetectorTest, UnreachableHostThatOthersReachIsALostConnection) {
  beginWithConnection(1, 3);
  breakConnection(3);
  EXPECT_TRUE(orders.asked.empty()) << "most answers come at once";
  pass(kLimit / 2);
  EXPECT_EQ(orders.asked, std::vector{peerNumber(3)});
  detector.seenElsewhere(peerNumber(3));
  probeSays(3, Liveness::kUnreachable);
  EXPECT_EQ(orders.failures.at(1).kind, FailureKind::kConnectionLost);
}

// The backup connection's port is filtered, say.
TEST_F(DetectorTest, PeerThatBeatsIsNotLostForABackupConnectionThatCannotBeMade) {
  begin(1, {member(3, true)});
  detector.connectionUp(now, peerNumber(3), LivenessKind::kMain);
  for (int beat = 0; beat < 20; ++beat) {
    pass(kLimit / 5);
    detector.heard(now, peerNumber(3));
    if (orders.lastProbeOf(peerNumber(3), LivenessKind::kBackup) != 0)
      probeSays(3, Liveness::kUnreachable, LivenessKind::kBackup);
  }
  EXPECT_GE(orders.probes.size(), 2U) << "it is tried again";
  EXPECT_TRUE(orders.asked.empty()) << "it is heard of";
  EXPECT_TRUE(orders.failures.empty());
  pass(kLimit * 2);
  EXPECT_EQ(orders.failures.at(1).kind, FailureKind::kPeerLost)
      << "the main connection has fallen silent";
}

TEST_F(DetectorTest, FrozenPeerMayJoinALaterGeneration) {
  beginWithConnection(1, 3);
  pass(kLimit * 2);
  ASSERT_EQ(orders.failures.count(1), 1U);
  begin(2, {member(3)});
  EXPECT_EQ(orders.failures.count(2), 0U);
  pass(milliseconds(1));
  ASSERT_EQ(orders.probes.size(), 1U) << "who was frozen is looked at, at once";
  probeSays(3, Liveness::kAlive);
  EXPECT_EQ(orders.failures.count(2), 0U);
  EXPECT_EQ(detector.tombstones(), 0U);
}

TEST_F(DetectorTest, PeerThatIsStillFrozenFailsALaterWatch) {
  beginWithConnection(1, 3);
  pass(kLimit * 2);
  begin(2, {member(3)});
  pass(kLimit);
  probeSays(3, Liveness::kSilent);
  EXPECT_EQ(orders.failures.at(2).kind, FailureKind::kPeerLost);
}

TEST_F(DetectorTest, ThawedProcessAccusesNobody) {
  beginWithConnection(1, 3);
  now += seconds(100);  // nothing ran
  detector.tick(now);
  detector.nextDue(now);
  EXPECT_TRUE(orders.failures.empty());
  pass(kLimit / 2 - milliseconds(1));
  EXPECT_TRUE(orders.failures.empty()) << "a fresh half limit";
  pass(kLimit);
  EXPECT_EQ(orders.failures.count(1), 1U);
}

TEST_F(DetectorTest, OtherEventsOfAThawDoNotHideThatItWasOne) {
  beginWithConnection(1, 3);
  begin(2, {member(2)});
  detector.connectionUp(now, peerNumber(2), LivenessKind::kMain);
  detector.nextDue(now);
  now += seconds(100);
  detector.connectionEnded(now, peerNumber(2), LivenessKind::kMain, LivenessEnd::kIdle);
  detector.nextDue(now);
  detector.tick(now);
  EXPECT_TRUE(orders.failures.empty());
}

TEST_F(DetectorTest, TimeInWhichThisProcessDidNotRunIsNoSilence) {
  beginWithConnection(1, 3);
  pass(kLimit / 2);
  now += kLimit * 45 / 100;  // less than half a limit late
  detector.tick(now);
  detector.nextDue(now);
  pass(kLimit / 4);
  EXPECT_TRUE(orders.failures.empty());
  pass(kLimit / 2);
  EXPECT_EQ(orders.failures.count(1), 1U);
}

TEST_F(DetectorTest, AccusedProcessNamesItself) {
  beginWithConnection(1, 3);
  begin(2, {member(2)});
  detector.connectionEnded(now, peerNumber(3), LivenessKind::kMain, LivenessEnd::kAccused);
  const Failure& failure = orders.failures.at(1);
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(failure.cause.rank, 0);
  EXPECT_EQ(failure.cause.pid, kPid);
  EXPECT_EQ(failure.cause.how.rfind("this process was frozen and left out", 0), 0U);
  EXPECT_EQ(orders.failures.count(2), 0U) << "that generation's members have not said so";
}

TEST_F(DetectorTest, AccusationOnALineOfAnEarlierGenerationIsOld) {
  beginWithConnection(1, 3);
  detector.connectionEnded(now, peerNumber(3), LivenessKind::kMain, LivenessEnd::kAccused);
  begin(2, {member(3, true)});
  detector.connectionEnded(now, peerNumber(3), LivenessKind::kBackup, LivenessEnd::kAccused);
  EXPECT_EQ(orders.failures.count(2), 0U);
}

TEST_F(DetectorTest, GoodbyeIsNoDeath) {
  beginWithConnection(1, 3);
  detector.connectionEnded(now, peerNumber(3), LivenessKind::kMain, LivenessEnd::kLeft);
  pass(seconds(60));
  EXPECT_TRUE(orders.failures.empty());
  EXPECT_TRUE(orders.wanted.empty());
}

TEST_F(DetectorTest, EndOfAPeerThatLeftTheGenerationIsNoDeath) {
  beginWithConnection(1, 3);
  begin(2, {member(3)});
  detector.peerLeft(now, 1, 3);
  breakConnection(3);
  probeSays(3, Liveness::kGone);
  EXPECT_EQ(orders.failures.count(1), 0U);
  EXPECT_EQ(orders.failures.count(2), 1U) << "it had left only one of the two generations";
}

TEST_F(DetectorTest, AbsentPeerIsLookedAtNowAndThen) {
  begin(1, {member(3)});
  pass(milliseconds(199));
  EXPECT_TRUE(orders.probes.empty());
  for (size_t looks = 1; looks < Detector::kLooksForAConnection; ++looks) {
    pass(seconds(6));
    ASSERT_EQ(orders.probes.size(), looks) << "one at a time, 5 s apart at most";
    probeSays(3, Liveness::kAlive);
  }
  EXPECT_TRUE(orders.failures.empty()) << "alive and not yet connected is no failure";
  pass(seconds(6));
  probeSays(3, Liveness::kGone);
  pass(seconds(1));
  probeSays(3, Liveness::kGone);
  EXPECT_EQ(orders.failures.at(1).cause.how, "its process ended");
}

TEST_F(DetectorTest, LivingNeighbourWithoutAConnectionIsALostConnectionInTheEnd) {
  begin(1, {member(3)});
  for (int looks = 0; looks < Detector::kLooksForAConnection; ++looks) {
    EXPECT_TRUE(orders.failures.empty());
    pass(seconds(6));
    probeSays(3, Liveness::kAlive);
  }
  const Failure& failure = orders.failures.at(1);
  EXPECT_EQ(failure.kind, FailureKind::kConnectionLost);
  EXPECT_EQ(failure.cause.how.rfind("no liveness connection could be made", 0), 0U);
}

TEST_F(DetectorTest, LongStopOfThisProcessIsNoReasonToGiveAConnectionUp) {
  begin(1, {member(3)});
  now += seconds(1000);
  detector.tick(now);
  probeSays(3, Liveness::kAlive);
  EXPECT_TRUE(orders.failures.empty());
}

TEST_F(DetectorTest, AnswerFromBeforeTheConnectionEndedDoesNotExcuseIt) {
  begin(1, {member(3)});
  pass(milliseconds(201));
  ASSERT_EQ(orders.probes.size(), 1U);
  detector.connectionUp(now, peerNumber(3), LivenessKind::kMain);
  now += milliseconds(1);
  breakConnection(3);
  probeSays(3, Liveness::kAlive);
  EXPECT_TRUE(orders.failures.empty());
  ASSERT_EQ(orders.probes.size(), 2U);
  probeSays(3, Liveness::kGone);
  EXPECT_EQ(orders.failures.at(1).kind, FailureKind::kPeerLost);
}

TEST_F(DetectorTest, ConnectionsAreWantedToTheNeighboursOnTheOverlayAlone) {
  std::vector<WatchedPeer> peers;
  for (int rank = 1; rank < 16; ++rank) peers.push_back(member(rank, true));
  begin(1, peers);
  std::set<int> main;
  std::set<int> backup;
  for (const auto& [watch, peer, kind] : orders.wanted) {
    (kind == LivenessKind::kMain ? main : backup).insert(peer.bytes[0]);
  }
  EXPECT_EQ(main, (std::set<int>{1, 2, 4, 8, 12, 14, 15}));
  EXPECT_EQ(backup, (std::set<int>{1, 15}));
}

TEST_F(DetectorTest, RanksCloseAroundALeaverAfterAWhile) {
  std::vector<WatchedPeer> peers;
  for (int rank = 1; rank < 16; ++rank) peers.push_back(member(rank, true));
  begin(1, peers);
  detector.peerLeft(now, 1, 1);
  EXPECT_EQ(orders.leavers.count({1, peerNumber(1)}), 1U);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(1), LivenessKind::kMain}), 0U);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(2), LivenessKind::kBackup}), 0U) << "not at once";
  pass(Detector::kRewireAfter);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(2), LivenessKind::kBackup}), 1U);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(3), LivenessKind::kMain}), 1U);
}

TEST_F(DetectorTest, DeathFailsWatchesInWhichItIsNoNeighbourToo) {
  std::vector<WatchedPeer> peers;
  for (int rank = 1; rank < 16; ++rank) peers.push_back(member(rank));
  begin(1, peers);
  detector.hearOfDeath(now, peerNumber(7));
  EXPECT_EQ(orders.failures.at(1).cause.rank, 7);
  begin(2, peers);
  EXPECT_EQ(orders.failures.at(2).cause.rank, 7) << "and stays dead";
}

TEST_F(DetectorTest, WarnsOnceOfAPeerThatIsSilentForASecond) {
  Detector slow(orders, seconds(5), kHost, kPid);
  slow.addWatch(now, 1, 0, {member(3)});
  slow.connectionUp(now, peerNumber(3), LivenessKind::kMain);
  const auto up = now;
  std::optional<Duration> warned_after;
  for (auto due = slow.nextDue(now); due && *due < up + seconds(4); due = slow.nextDue(now)) {
    now = *due;
    slow.tick(now);
    if (!warned_after && !orders.warnings.empty()) warned_after = now - up;
  }
  EXPECT_EQ(orders.warnings.size(), 1U);
  ASSERT_TRUE(warned_after.has_value());
  EXPECT_GE(*warned_after, seconds(1));
  EXPECT_LE(*warned_after, milliseconds(1100));
  EXPECT_TRUE(orders.failures.empty());
}

TEST_F(DetectorTest, WarnsOnceOfAPeerWhoseConnectionNeverCameUp) {
  Detector slow(orders, seconds(5), kHost, kPid);
  slow.addWatch(now, 1, 0, {member(3)});
  const auto until = now + seconds(4);
  for (auto due = slow.nextDue(now); due && *due < until; due = slow.nextDue(now)) {
    now = *due;
    slow.tick(now);
  }
  EXPECT_EQ(orders.probes.size(), 1U);
  EXPECT_EQ(orders.warnings.size(), 1U);
  EXPECT_TRUE(orders.failures.empty()) << "the probe says when its time is over";
}

TEST_F(DetectorTest, ConnectionThatCameUpSaysMoreThanAnOlderProbe) {
  begin(1, {member(3)});
  pass(milliseconds(201));
  ASSERT_EQ(orders.probes.size(), 1U);
  detector.connectionUp(now, peerNumber(3), LivenessKind::kMain);
  probeSays(3, Liveness::kGone);
  EXPECT_TRUE(orders.failures.empty()) << "it may just be saying goodbye";
  breakConnection(3);
  EXPECT_EQ(orders.probes.size(), 2U);
  probeSays(3, Liveness::kGone);
  EXPECT_EQ(orders.failures.count(1), 1U);
}

TEST_F(DetectorTest, NothingIsKeptOfWatchesThatEnded) {
  for (WatchId id = 1; id <= 1000; ++id) {
    begin(id, {member(2, true), member(3, true)});
    detector.connectionUp(now, peerNumber(2), LivenessKind::kMain);
    pass(milliseconds(10));
    detector.removeWatch(id);
  }
  EXPECT_EQ(detector.neighbours(), 0U);
  EXPECT_EQ(detector.counts().watches, 0);
  EXPECT_TRUE(orders.wanted.empty());
  EXPECT_EQ(detector.nextDue(now), std::nullopt);
}

}  // namespace
}  // namespace torchft_ext
