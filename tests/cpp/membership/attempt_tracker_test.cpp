#include "membership/attempt_tracker.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/member_incarnation.h"
#include "cpp/membership/fake_member_prober.h"

namespace torchft_ext {
namespace {

MemberRecord processOf(int pid) {
  MemberRecord made;
  made.incarnation = Incarnation::random();
  made.token = Token::random();
  made.host = "host";
  made.pid = pid;
  return made;
}

MemberRecord again(MemberRecord record) {
  record.token = Token::random();
  return record;
}

Ending endedBy(const MemberRecord& who, int rank, FailureKind kind) {
  Ending ending;
  ending.failure.kind = kind;
  ending.failure.cause = {rank, -1, who.host, who.pid, "a test said so"};
  ending.origin = who.token;
  ending.culprit = who.incarnation;
  return ending;
}

std::string failureRecordOf(const MemberRecord& member, const Ending& ending,
                            std::vector<Token> meant_for = {}) {
  return encodeFailureRecord({member, ending, std::move(meant_for)});
}

struct AttemptTrackerTest : testing::Test {
  std::shared_ptr<FakeWorld> world = std::make_shared<FakeWorld>();
  FakeMemberProber* prober = nullptr;  // of the newest attempt
  // Three processes that were the last generation.
  std::vector<MemberRecord> members{processOf(100), processOf(101), processOf(102)};

  AttemptMemory lastGeneration(bool healthy) const {
    AttemptMemory memory;
    memory.members = members;
    memory.healthy = healthy;
    return memory;
  }
  AttemptTracker at(int rank, AttemptMemory memory = {}, int size = 3) {
    return of(again(members[static_cast<size_t>(rank)]), rank, std::move(memory), size);
  }
  AttemptTracker of(const MemberRecord& self, int rank, AttemptMemory memory, int size = 3) {
    auto made = std::make_unique<FakeMemberProber>(world);
    prober = made.get();
    return {rank, size, self, std::move(memory), std::move(made)};
  }
};

TEST_F(AttemptTrackerTest, AProcessThatAnsweredAndDiesEndsTheAttempt) {
  AttemptTracker tracker = at(0);
  const MemberRecord other = processOf(7);
  EXPECT_FALSE(tracker.judgeRecord(1, encodeRecord(other)));
  EXPECT_FALSE(tracker.judgeUpdates());
  world->set(other.incarnation, Liveness::kGone);
  ASSERT_TRUE(tracker.hasUpdates());
  const auto ending = tracker.judgeUpdates();
  ASSERT_TRUE(ending);
  EXPECT_EQ(ending->failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(ending->failure.cause.rank, 1);
  EXPECT_EQ(ending->failure.cause.host, "host");
  EXPECT_EQ(ending->failure.cause.pid, 7);
}

// A group made beside the one whose generation that was.
TEST_F(AttemptTrackerTest, AMemberOfAnotherGroupsGenerationThatDiesBeforeItComesEndsTheAttempt) {
  AttemptMemory memory = lastGeneration(true);
  memory.elsewhere = true;
  AttemptTracker tracker = at(1, memory);
  world->set(members[2].incarnation, Liveness::kGone);
  const auto ending = tracker.judgeUpdates();
  ASSERT_TRUE(ending);
  EXPECT_EQ(ending->failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(ending->failure.cause.rank, 2);
}

// Threads as ranks: the engine of one of them ended with its group, and it may come with another.
TEST_F(AttemptTrackerTest, ARankOfThisProcessThatEndedBeforeItComesEndsNothing) {
  std::copy_n(members[1].incarnation.bytes.begin(), ProcessPart().size(),
              members[2].incarnation.bytes.begin());
  AttemptTracker tracker = at(1, lastGeneration(true));
  world->set(members[2].incarnation, Liveness::kGone);
  EXPECT_FALSE(tracker.judgeUpdates());
  world->set(members[0].incarnation, Liveness::kGone);
  EXPECT_TRUE(tracker.judgeUpdates());
}

TEST_F(AttemptTrackerTest, AnOldFailureRecordOfAMemberOfAnotherGroupsGenerationIsLeftOver) {
  AttemptMemory memory = lastGeneration(true);
  memory.elsewhere = true;
  const MemberRecord old = again(members[0]);
  const std::string words = failureRecordOf(old, endedBy(old, 0, FailureKind::kAborted));
  EXPECT_FALSE(at(1, memory).judgeRecord(0, words));
  EXPECT_TRUE(at(1, lastGeneration(true)).judgeRecord(0, words));
}

TEST_F(AttemptTrackerTest, ADeadStrangersRecordIsLeftOverUntilANewProcessTakesItsPlace) {
  AttemptTracker tracker = at(0);
  const MemberRecord stale = processOf(7);
  world->set(stale.incarnation, Liveness::kGone);
  tracker.judgeRecord(1, encodeRecord(stale));
  EXPECT_FALSE(tracker.judgeUpdates());
  EXPECT_EQ(tracker.leftOver().count(stale.incarnation), 1U);
  const MemberRecord fresh = processOf(8);
  tracker.judgeRecord(1, encodeRecord(fresh));
  EXPECT_FALSE(tracker.judgeUpdates());
  world->set(fresh.incarnation, Liveness::kGone);
  EXPECT_TRUE(tracker.judgeUpdates());
}

TEST_F(AttemptTrackerTest, AFrozenStrangerEndsTheAttemptButAnUnreachableOneIsLeftOver) {
  const MemberRecord frozen = processOf(7);
  const MemberRecord unreachable = processOf(8);
  world->set(frozen.incarnation, Liveness::kSilent);
  world->set(unreachable.incarnation, Liveness::kUnreachable);
  AttemptTracker tracker = at(0);
  tracker.judgeRecord(2, encodeRecord(unreachable));
  EXPECT_FALSE(tracker.judgeUpdates());
  tracker.judgeRecord(1, encodeRecord(frozen));
  ASSERT_TRUE(tracker.judgeUpdates());
}

TEST_F(AttemptTrackerTest, ADeathIsToldOnceAndTheNextAttemptWaitsForAnother) {
  AttemptTracker first = at(0);
  const MemberRecord other = processOf(7);
  first.judgeRecord(1, encodeRecord(other));
  first.judgeUpdates();
  world->set(other.incarnation, Liveness::kGone);
  const auto ending = first.judgeUpdates();
  ASSERT_TRUE(ending);
  AttemptTracker second = at(0, first.failed(first.endingOf(ending->failure)));
  second.judgeRecord(1, encodeRecord(other));
  EXPECT_FALSE(second.judgeUpdates());
  EXPECT_EQ(second.leftOver().count(other.incarnation), 1U);
}

TEST_F(AttemptTrackerTest, AMemberOfTheHealthyGenerationThatDiesBeforeItComesEndsTheAttempt) {
  for (const int rank : {0, 2}) {
    world->set(members[1].incarnation, Liveness::kAlive);
    AttemptTracker tracker = at(rank, lastGeneration(true));
    world->set(members[1].incarnation, Liveness::kGone);
    const auto ending = tracker.judgeUpdates();
    ASSERT_TRUE(ending) << rank;
    EXPECT_EQ(ending->failure.cause.rank, 1);
    EXPECT_EQ(ending->failure.cause.pid, 101);
  }
}

TEST_F(AttemptTrackerTest, MembersThatMayStayOutAreNotWatched) {
  AttemptTracker smaller = at(0, lastGeneration(true), 2);
  EXPECT_FALSE(prober->watches(members[1]));
  AttemptMemory memory = lastGeneration(false);
  memory.told.insert(members[2].incarnation);
  AttemptTracker fitting = at(0, std::move(memory), 2);
  EXPECT_TRUE(prober->watches(members[1]));
  EXPECT_FALSE(prober->watches(members[2]));
}

TEST_F(AttemptTrackerTest, ANewProcessLeavesNoRoomForAMemberThatIsReplaced) {
  AttemptTracker tracker = at(0, lastGeneration(true));
  tracker.judgeRecord(1, encodeRecord(processOf(7)));
  world->set(members[1].incarnation, Liveness::kGone);
  EXPECT_FALSE(tracker.judgeUpdates());
  EXPECT_TRUE(tracker.leftOver().empty());
}

// A new order of ranks is in the making: the old one's rank would name another, maybe oneself.
TEST_F(AttemptTrackerTest, AMemberThatDiesBeforeItComesHasNoRankIfRanksChange) {
  AttemptTracker tracker = of(again(members[2]), 0, lastGeneration(true));
  world->set(members[0].incarnation, Liveness::kGone);
  const auto ending = tracker.judgeUpdates();
  ASSERT_TRUE(ending);
  EXPECT_EQ(ending->failure.cause.rank, -1);
  EXPECT_EQ(ending->failure.cause.pid, 100);
}

TEST_F(AttemptTrackerTest, AMemberOfABrokenGenerationCountsOnlyOnceItAnswered) {
  world->set(members[1].incarnation, Liveness::kGone);
  AttemptTracker late = at(0, lastGeneration(false));
  EXPECT_FALSE(late.judgeUpdates());
  world->set(members[1].incarnation, Liveness::kAlive);
  AttemptTracker early = at(0, lastGeneration(false));
  EXPECT_FALSE(early.judgeUpdates());
  world->set(members[1].incarnation, Liveness::kGone);
  EXPECT_TRUE(early.judgeUpdates());
}

TEST_F(AttemptTrackerTest, AMemberOfABrokenGenerationThatHasComeSinceCountsWhicheverIsSeenFirst) {
  world->set(members[1].incarnation, Liveness::kGone);
  AttemptTracker end_first = at(0, lastGeneration(false));
  EXPECT_FALSE(end_first.judgeUpdates());
  const auto ending = end_first.judgeRecord(1, encodeRecord(again(members[1])));
  ASSERT_TRUE(ending);
  EXPECT_EQ(ending->failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(ending->failure.cause.rank, 1);
  EXPECT_EQ(ending->culprit, members[1].incarnation);
  AttemptTracker record_first = at(0, lastGeneration(false));
  EXPECT_FALSE(record_first.judgeRecord(1, encodeRecord(again(members[1]))));
  EXPECT_TRUE(record_first.judgeUpdates());
}

TEST_F(AttemptTrackerTest, AFreezeSeenBeforeTheRecordDoesNotCount) {
  world->set(members[1].incarnation, Liveness::kSilent);
  AttemptTracker tracker = at(0, lastGeneration(false));
  EXPECT_FALSE(tracker.judgeUpdates());
  EXPECT_FALSE(tracker.judgeRecord(1, encodeRecord(again(members[1]))));
  world->set(members[1].incarnation, Liveness::kAlive);
  EXPECT_FALSE(tracker.judgeUpdates());
  EXPECT_EQ(tracker.leftOver().count(members[1].incarnation), 0U);
}

TEST_F(AttemptTrackerTest, TheBrokenGenerationsOwnRecordIsLeftOver) {
  world->set(members[1].incarnation, Liveness::kGone);
  AttemptTracker tracker = at(0, lastGeneration(false));
  EXPECT_FALSE(tracker.judgeRecord(1, encodeRecord(members[1])));
  EXPECT_FALSE(tracker.judgeUpdates());
  EXPECT_EQ(tracker.leftOver().count(members[1].incarnation), 1U);
}

TEST_F(AttemptTrackerTest, OthersWatchRankZeroAloneOnceItHasCome) {
  AttemptTracker tracker = at(2, lastGeneration(true));
  EXPECT_TRUE(prober->watches(members[0]));
  EXPECT_TRUE(prober->watches(members[1]));
  tracker.judgeRecord(0, encodeRecord(again(members[0])));
  EXPECT_TRUE(prober->watches(members[0]));
  EXPECT_FALSE(prober->watches(members[1]));
}

TEST_F(AttemptTrackerTest, AFailureRecordOfARecordSeenHereIsPassedOnAsItIs) {
  for (const FailureKind kind : {FailureKind::kAborted, FailureKind::kTimeout,
                                 FailureKind::kPeerLost, FailureKind::kPeerLeft}) {
    AttemptTracker tracker = at(2);
    const MemberRecord leader = again(members[0]);
    tracker.judgeRecord(0, encodeRecord(leader));
    const auto ending =
        tracker.judgeRecord(0, failureRecordOf(leader, endedBy(members[1], 1, kind)));
    ASSERT_TRUE(ending);
    EXPECT_EQ(ending->failure.kind, kind);
    EXPECT_EQ(ending->failure.cause.rank, 1);
    EXPECT_EQ(tracker.endingOf(ending->failure).origin, members[1].token);
  }
}

TEST_F(AttemptTrackerTest, AFailureRecordWithoutACauseNamesItsMember) {
  AttemptTracker tracker = at(0);
  const MemberRecord other = again(members[1]);
  tracker.judgeRecord(1, encodeRecord(other));
  Ending ending;
  ending.failure.kind = FailureKind::kTimeout;
  ending.failure.cause.how = "rank 0 did not come";
  ending.origin = other.token;
  const auto judged = tracker.judgeRecord(1, failureRecordOf(other, ending));
  ASSERT_TRUE(judged);
  EXPECT_EQ(judged->failure.cause.rank, 1);
  EXPECT_EQ(judged->failure.cause.pid, 101);
}

TEST_F(AttemptTrackerTest, WhoComesAfterTheEndWaitsUnlessItComesFromTheSameGeneration) {
  const MemberRecord leader = again(members[0]);
  const std::string notice =
      failureRecordOf(leader, endedBy(members[1], 1, FailureKind::kPeerLost));
  EXPECT_FALSE(at(2).judgeRecord(0, notice));
  EXPECT_FALSE(at(2, lastGeneration(false)).judgeRecord(0, notice));
  EXPECT_FALSE(of(processOf(9), 2, lastGeneration(false)).judgeRecord(0, notice));
  EXPECT_TRUE(at(2, lastGeneration(true)).judgeRecord(0, notice));
  const std::string late = failureRecordOf(leader, endedBy(leader, 0, FailureKind::kTimeout));
  EXPECT_FALSE(at(2, lastGeneration(true)).judgeRecord(0, late));
}

TEST_F(AttemptTrackerTest, AFailureRecordAddressedToTheAttemptEndsItThoughItsRecordWasNeverSeen) {
  const MemberRecord other = again(members[1]);
  const MemberRecord self = again(members[0]);
  for (const FailureKind kind : {FailureKind::kAborted, FailureKind::kTimeout}) {
    const Ending ending = endedBy(other, 1, kind);
    AttemptTracker tracker = of(self, 0, {});
    EXPECT_FALSE(tracker.judgeRecord(1, failureRecordOf(other, ending, {members[2].token})));
    const auto told =
        tracker.judgeRecord(1, failureRecordOf(other, ending, {members[2].token, self.token}));
    ASSERT_TRUE(told);
    EXPECT_EQ(told->failure.kind, kind);
    EXPECT_EQ(told->failure.cause.rank, 1);
  }
}

// Two groups with one incarnation have entered as ranks 0 and 1.
TEST_F(AttemptTrackerTest, AFailureRecordOfTheSameProcessCountsOnlyIfAddressedToTheAttempt) {
  const MemberRecord self = again(members[1]);
  const MemberRecord twin = again(members[1]);
  Ending refused;
  refused.failure.kind = FailureKind::kRendezvous;
  refused.failure.cause.how = "ranks 0 and 1 are the same process";
  refused.origin = twin.token;
  AttemptTracker tracker = of(self, 1, {}, 2);
  EXPECT_FALSE(tracker.judgeRecord(0, failureRecordOf(twin, refused)));
  const auto told = tracker.judgeRecord(0, failureRecordOf(twin, refused, {self.token}));
  ASSERT_TRUE(told);
  EXPECT_EQ(told->failure.kind, FailureKind::kRendezvous);
  EXPECT_EQ(told->failure.cause.rank, 0);
}

// Rank 2 was told over the connections and tries again; only then rank 0, which was told too,
// publishes its failure.
TEST_F(AttemptTrackerTest, AnEndThatWasToldIsNotToldAgainByAnother) {
  const MemberRecord leader = again(members[0]);
  const MemberRecord aborter = again(members[1]);
  const Ending abort = endedBy(aborter, 1, FailureKind::kAborted);
  AttemptTracker first = at(2, lastGeneration(true));
  first.judgeRecord(0, encodeRecord(leader));
  first.noteRoster({leader, aborter, members[2]});
  AttemptTracker second = at(2, first.failed(first.endingOf(abort.failure)));
  second.judgeRecord(0, encodeRecord(leader));
  EXPECT_FALSE(second.judgeRecord(0, failureRecordOf(leader, abort)));
  EXPECT_FALSE(second.judgeRecord(0, encodeRecord(again(leader))));
}

TEST_F(AttemptTrackerTest, ItsOwnAbortDoesNotComeBackToARetryingMember) {
  const MemberRecord leader = again(members[0]);
  const MemberRecord self = again(members[1]);
  AttemptTracker first = of(self, 1, {});
  const Ending abort = first.endingOf(endedBy(self, 1, FailureKind::kAborted).failure);
  EXPECT_EQ(abort.origin, self.token);
  AttemptTracker second = of(again(self), 1, first.failed(abort));
  second.judgeRecord(0, encodeRecord(leader));
  EXPECT_FALSE(second.judgeRecord(0, failureRecordOf(leader, abort)));
}

// It formed the generation; another one, which ran out of time there, says so late.
TEST_F(AttemptTrackerTest, AnAttemptThatFormedAGenerationIsNotSaidToHaveFailedTheNextOne) {
  const MemberRecord self = again(members[0]);
  const MemberRecord other = again(members[1]);
  AttemptTracker first = of(self, 0, {});
  const MemberRecord next = again(self);
  AttemptTracker second = of(next, 0, first.formed({self, other, members[2]}));
  const Ending late = endedBy(self, 0, FailureKind::kTimeout);
  EXPECT_FALSE(second.judgeRecord(1, failureRecordOf(other, late, {next.token})));
}

TEST_F(AttemptTrackerTest, AFrozenProcessThatIsBackCountsAgain) {
  AttemptMemory memory;
  memory.told.insert(members[1].incarnation);
  AttemptTracker tracker = at(0, std::move(memory));
  tracker.judgeRecord(1, encodeRecord(again(members[1])));
  EXPECT_FALSE(tracker.judgeUpdates());
  world->set(members[1].incarnation, Liveness::kSilent);
  EXPECT_TRUE(tracker.judgeUpdates());
}

TEST_F(AttemptTrackerTest, AGenerationClearsWhatWasTold) {
  AttemptTracker tracker = at(0, lastGeneration(false));
  AttemptMemory memory = tracker.failed(endedBy(members[1], 1, FailureKind::kPeerLost));
  EXPECT_FALSE(memory.told.empty());
  AttemptTracker next = at(0, std::move(memory));
  memory = next.formed(members);
  EXPECT_TRUE(memory.told.empty());
  EXPECT_EQ(memory.settled.size(), 1U) << "its own alone";
  EXPECT_EQ(memory.members.size(), 3U);
}

}  // namespace
}  // namespace torchft_ext
