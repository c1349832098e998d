// One sentry among peers that the test plays: what it tells whom, and what it keeps.
#include "peers/sentry.h"

#include <gtest/gtest.h>

#include "detector_recorder.h"

namespace torchft_ext {
namespace {

using std::chrono::seconds;

class Paper : public SentryOrders {
 public:
  void fail(WatchId watch, Failure failure) override {
    EXPECT_TRUE(failures.emplace(watch, std::move(failure)).second) << "told twice: " << watch;
  }
  bool send(const Incarnation& to, const Notice& notice) override {
    if (lines.count(to) == 0) return false;
    if (notice.type != Notice::Type::kAsk) sent.emplace_back(to, notice);
    return true;
  }
  void retire(WatchId watch) override { retired.push_back(watch); }
  void wantLine(WatchId watch, const Incarnation& peer, LineKind) override {
    wanted.emplace(watch, peer);
  }
  void unwantLine(WatchId watch, const Incarnation& peer, LineKind) override {
    EXPECT_EQ(wanted.erase({watch, peer}), 1U);
  }
  void probe(const Incarnation&, LineKind, const ProbeOrder&) override {}
  void accuse(const Incarnation&, const std::string&) override {}
  void warn(const std::string&) override {}
  std::string processState(const std::string&, int64_t) override { return ""; }

  std::set<Incarnation> lines;  // that stand
  std::map<WatchId, Failure> failures;
  std::vector<std::pair<Incarnation, Notice>> sent;
  std::vector<WatchId> retired;
  std::set<std::pair<WatchId, Incarnation>> wanted;
};

class SentryTest : public ::testing::Test {
 protected:
  // A generation of this process, rank 0, and ranks 1 to `others`.
  void begin(WatchId id, int others) {
    std::vector<WatchedPeer> peers;
    for (int rank = 1; rank <= others; ++rank) peers.push_back(member(rank));
    sentry.addWatch(now, id, nonceOf(id), 0, peers);
  }
  void lineUp(int peer) {
    orders.lines.insert(peerNumber(peer));
    sentry.lineUp(now, peerNumber(peer), LineKind::kMain);
  }
  void hear(int from, const Notice& notice) { sentry.noticed(now, peerNumber(from), notice); }
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
  Sentry sentry{orders, Duration::zero(), {peerNumber(100), kHost, kPid}};
};

TEST_F(SentryTest, SendsAFailureOnOnceToAllAndSoConfirmsIt) {
  begin(1, 3);
  for (int peer = 1; peer <= 3; ++peer) lineUp(peer);
  hear(1, failed(1, FailureKind::kAborted, 2));
  hear(2, failed(1, FailureKind::kAborted, 2));
  EXPECT_EQ(orders.failures.at(1).kind, FailureKind::kAborted);
  ASSERT_EQ(orders.sent.size(), 3U);
  for (int peer = 1; peer <= 3; ++peer) {
    EXPECT_EQ(orders.sent[static_cast<size_t>(peer - 1)].first, peerNumber(peer));
  }
}

TEST_F(SentryTest, DeathThatIsHeardOfFailsEveryGenerationWithThatProcess) {
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

TEST_F(SentryTest, FreezeThatIsHeardOfFailsThatGenerationAlone) {
  begin(1, 3);
  begin(2, 3);
  hear(1, failed(1, FailureKind::kPeerLost, 2));
  EXPECT_EQ(orders.failures.count(1), 1U);
  EXPECT_EQ(orders.failures.count(2), 0U);
}

TEST_F(SentryTest, NewsAheadOfAGenerationFailsItWhenItBegins) {
  begin(1, 2);
  hear(1, failed(2, FailureKind::kAborted, 1));
  EXPECT_TRUE(orders.failures.empty());
  begin(2, 2);
  EXPECT_EQ(orders.failures.at(2).cause.rank, 1);
}

TEST_F(SentryTest, NewsBehindAGenerationIsDropped) {
  begin(1, 2);
  sentry.removeWatch(now, 1);
  hear(1, failed(1, FailureKind::kAborted, 1));
  begin(2, 2);
  EXPECT_TRUE(orders.failures.empty());
}

TEST_F(SentryTest, WhoAsksAboutAPastGenerationIsTold) {
  begin(1, 2);
  lineUp(1);
  lineUp(2);
  hear(1, failed(1, FailureKind::kAborted, 1));
  hear(2, failed(1, FailureKind::kAborted, 1));
  sentry.removeWatch(now, 1);
  EXPECT_EQ(orders.retired, std::vector<WatchId>{1});
  orders.sent.clear();
  Notice question;
  question.generation = nonceOf(1);
  hear(2, question);
  ASSERT_EQ(orders.sent.size(), 1U);
  EXPECT_EQ(orders.sent[0].second.failure.kind, FailureKind::kAborted);
}

TEST_F(SentryTest, LinesToTheUntoldStayWantedUntilTheySayThatTheyKnow) {
  begin(1, 2);
  lineUp(1);
  sentry.announce(now, 1, failed(1, FailureKind::kTimeout, 0).failure);
  sentry.removeWatch(now, 1);
  EXPECT_TRUE(orders.failures.empty()) << "its owner knows";
  EXPECT_EQ(orders.wanted.size(), 2U);
  EXPECT_TRUE(orders.retired.empty());
  hear(1, failed(1, FailureKind::kTimeout, 0));
  lineUp(2);
  EXPECT_EQ(orders.sent.back().first, peerNumber(2));
  EXPECT_EQ(orders.wanted.size(), 1U) << "what was sent may not have arrived";
  orders.sent.clear();
  lineUp(2);
  EXPECT_TRUE(orders.sent.empty()) << "this line has brought it";
  sentry.lineEnded(now, peerNumber(2), LineKind::kMain, LineEnd::kIdle);
  lineUp(2);
  EXPECT_EQ(orders.sent.size(), 1U) << "told again over the next line";
  hear(2, failed(1, FailureKind::kTimeout, 0));
  EXPECT_TRUE(orders.wanted.empty());
  EXPECT_EQ(orders.retired, std::vector<WatchId>{1});
  EXPECT_EQ(sentry.generations(), 0U);
}

TEST_F(SentryTest, LinesToTheUntoldAreGivenUpInTheEnd) {
  begin(1, 2);
  sentry.announce(now, 1, failed(1, FailureKind::kTimeout, 0).failure);
  sentry.removeWatch(now, 1);
  sentry.probed(now, peerNumber(1), LineKind::kMain, ProbeEnd::kGone, 0);
  EXPECT_EQ(orders.wanted.size(), 1U) << "who is gone need not be told";
  const auto end = now + Herald::kKeptFor;
  now += Herald::kCloseAfter;  // it may have left before
  sentry.tick(now);
  EXPECT_EQ(orders.wanted.size(), 1U);
  ASSERT_EQ(sentry.nextDue(now), end);
  now = end;
  sentry.tick(now);
  EXPECT_TRUE(orders.wanted.empty());
  EXPECT_EQ(orders.retired, std::vector<WatchId>{1});
  EXPECT_EQ(sentry.nextDue(now), std::nullopt);
}

TEST_F(SentryTest, RingClosesAroundThoseWhoLeftWithoutHavingHeard) {
  begin(1, 7);  // a ring with chords: 0 and 3 are no neighbours
  sentry.announce(now, 1, failed(1, FailureKind::kTimeout, 0).failure);
  sentry.removeWatch(now, 1);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(3)}), 0U);
  Notice leaver;
  leaver.type = Notice::Type::kLeft;
  leaver.generation = nonceOf(1);
  leaver.rank = 2;
  hear(1, leaver);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(2)}), 0U);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(3)}), 0U) << "others may leave with it";
  ASSERT_EQ(sentry.nextDue(now), now + Herald::kCloseAfter);
  sentry.tick(now + Herald::kCloseAfter);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(3)}), 1U);
  lineUp(3);
  EXPECT_EQ(orders.sent.back().first, peerNumber(3));
}

TEST_F(SentryTest, LeaverThatKnewLeavesTheRingAsItIs) {
  begin(1, 7);
  sentry.announce(now, 1, failed(1, FailureKind::kTimeout, 0).failure);
  hear(2, failed(1, FailureKind::kTimeout, 0));
  Notice leaver;
  leaver.type = Notice::Type::kLeft;
  leaver.generation = nonceOf(1);
  leaver.rank = 2;
  hear(1, leaver);
  EXPECT_EQ(sentry.nextDue(now), now + Herald::kKeptFor) << "for the other neighbours";
}

TEST_F(SentryTest, RingClosesAroundLeaversWhoseLinesAreStillWanted) {
  begin(1, 7);
  sentry.peerLeft(now, 1, 2);
  lineUp(3);
  sentry.announce(now, 1, failed(1, FailureKind::kTimeout, 0).failure);
  sentry.removeWatch(now, 1);
  EXPECT_EQ(orders.wanted.count({1, peerNumber(3)}), 1U) << "before the time to rewire";
}

TEST_F(SentryTest, RemovedWatchSaysThatItsMemberLeft) {
  begin(1, 2);
  lineUp(1);
  lineUp(2);
  sentry.removeWatch(now, 1);
  ASSERT_EQ(orders.sent.size(), 2U);
  EXPECT_EQ(orders.sent[0].second.type, Notice::Type::kLeft);
  EXPECT_EQ(orders.sent[0].second.rank, 0);
}

TEST_F(SentryTest, LeaverIsPassedOnOnceAndItsEndIsNoDeath) {
  begin(1, 3);
  for (int peer = 1; peer <= 3; ++peer) lineUp(peer);
  Notice leaver;
  leaver.type = Notice::Type::kLeft;
  leaver.generation = nonceOf(1);
  leaver.rank = 3;
  hear(3, leaver);
  hear(1, leaver);
  EXPECT_EQ(orders.sent.size(), 2U);
  sentry.probed(now, peerNumber(3), LineKind::kMain, ProbeEnd::kGone, 0);
  EXPECT_TRUE(orders.failures.empty());
}

TEST_F(SentryTest, LateLineBringsTheLeaversToo) {
  begin(1, 3);
  sentry.peerLeft(now, 1, 3);
  lineUp(1);
  Notice question;
  question.generation = nonceOf(1);
  hear(1, question);
  ASSERT_EQ(orders.sent.size(), 1U);
  EXPECT_EQ(orders.sent[0].second.rank, 3);
}

TEST_F(SentryTest, ProcessThatIsNamedItselfSaysSoInItsOwnWords) {
  begin(1, 2);
  hear(1, failed(1, FailureKind::kPeerLost, 0));
  const Failure& failure = orders.failures.at(1);
  EXPECT_EQ(failure.cause.rank, 0);
  EXPECT_EQ(failure.cause.pid, kPid);
  EXPECT_EQ(failure.cause.how.rfind("this process was frozen and left out", 0), 0U);
}

TEST_F(SentryTest, RanksOutsideTheGenerationAreNotBelieved) {
  begin(1, 2);
  hear(1, failed(1, FailureKind::kAborted, 3));
  EXPECT_TRUE(orders.failures.empty());
}

}  // namespace
}  // namespace torchft_ext
