#include "rendezvous/attendance.h"

#include <gtest/gtest.h>

#include "fake_vigil.h"

namespace torchft_ext {
namespace {

using Sight = Vigil::Sight;

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

std::string withdrawn(const MemberRecord& member, const Ending& ending,
                      std::vector<Token> meant_for = {}) {
  return encodeWithdrawal({member, ending, std::move(meant_for)});
}

struct AttendanceTest : testing::Test {
  std::shared_ptr<FakeWorld> world = std::make_shared<FakeWorld>();
  FakeVigil* vigil = nullptr;  // of the newest attempt
  // Three processes that were the last generation.
  std::vector<MemberRecord> members{processOf(100), processOf(101), processOf(102)};

  AttemptMemory lastGeneration(bool healthy) const {
    AttemptMemory memory;
    memory.members = members;
    memory.healthy = healthy;
    return memory;
  }
  Attendance at(int rank, AttemptMemory memory = {}, int size = 3) {
    return of(again(members[static_cast<size_t>(rank)]), rank, std::move(memory), size);
  }
  Attendance of(const MemberRecord& self, int rank, AttemptMemory memory, int size = 3) {
    auto made = std::make_unique<FakeVigil>(world);
    vigil = made.get();
    return {rank, size, self, std::move(memory), std::move(made)};
  }
};

TEST_F(AttendanceTest, AProcessThatAnsweredAndDiesEndsTheAttempt) {
  Attendance attendance = at(0);
  const MemberRecord other = processOf(7);
  EXPECT_FALSE(attendance.judgeRecord(1, encodeRecord(other)));
  EXPECT_FALSE(attendance.judgeNews());
  world->set(other.incarnation, Sight::kGone);
  ASSERT_TRUE(attendance.hasNews());
  const auto ending = attendance.judgeNews();
  ASSERT_TRUE(ending);
  EXPECT_EQ(ending->failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(ending->failure.cause.rank, 1);
  EXPECT_EQ(ending->failure.cause.host, "host");
  EXPECT_EQ(ending->failure.cause.pid, 7);
}

// A group made beside the one whose generation that was.
TEST_F(AttendanceTest, AMemberOfAnotherGroupsGenerationThatDiesBeforeItComesEndsTheAttempt) {
  AttemptMemory memory = lastGeneration(true);
  memory.elsewhere = true;
  Attendance attendance = at(1, memory);
  world->set(members[2].incarnation, Sight::kGone);
  const auto ending = attendance.judgeNews();
  ASSERT_TRUE(ending);
  EXPECT_EQ(ending->failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(ending->failure.cause.rank, 2);
}

TEST_F(AttendanceTest, AnOldWithdrawalOfAMemberOfAnotherGroupsGenerationIsLeftOver) {
  AttemptMemory memory = lastGeneration(true);
  memory.elsewhere = true;
  const MemberRecord old = again(members[0]);
  const std::string words = withdrawn(old, endedBy(old, 0, FailureKind::kAborted));
  EXPECT_FALSE(at(1, memory).judgeRecord(0, words));
  EXPECT_TRUE(at(1, lastGeneration(true)).judgeRecord(0, words));
}

TEST_F(AttendanceTest, ADeadStrangersRecordIsLeftOverUntilANewProcessTakesItsPlace) {
  Attendance attendance = at(0);
  const MemberRecord stale = processOf(7);
  world->set(stale.incarnation, Sight::kGone);
  attendance.judgeRecord(1, encodeRecord(stale));
  EXPECT_FALSE(attendance.judgeNews());
  EXPECT_EQ(attendance.leftOver().count(stale.incarnation), 1U);
  const MemberRecord fresh = processOf(8);
  attendance.judgeRecord(1, encodeRecord(fresh));
  EXPECT_FALSE(attendance.judgeNews());
  world->set(fresh.incarnation, Sight::kGone);
  EXPECT_TRUE(attendance.judgeNews());
}

TEST_F(AttendanceTest, AFrozenStrangerEndsTheAttemptButAnUnreachableOneIsLeftOver) {
  const MemberRecord frozen = processOf(7);
  const MemberRecord unreachable = processOf(8);
  world->set(frozen.incarnation, Sight::kFrozen);
  world->set(unreachable.incarnation, Sight::kUnreachable);
  Attendance attendance = at(0);
  attendance.judgeRecord(2, encodeRecord(unreachable));
  EXPECT_FALSE(attendance.judgeNews());
  attendance.judgeRecord(1, encodeRecord(frozen));
  ASSERT_TRUE(attendance.judgeNews());
}

TEST_F(AttendanceTest, ADeathIsToldOnceAndTheNextAttemptWaitsForAnother) {
  Attendance first = at(0);
  const MemberRecord other = processOf(7);
  first.judgeRecord(1, encodeRecord(other));
  first.judgeNews();
  world->set(other.incarnation, Sight::kGone);
  const auto ending = first.judgeNews();
  ASSERT_TRUE(ending);
  Attendance second = at(0, first.failed(first.endingOf(ending->failure)));
  second.judgeRecord(1, encodeRecord(other));
  EXPECT_FALSE(second.judgeNews());
  EXPECT_EQ(second.leftOver().count(other.incarnation), 1U);
}

TEST_F(AttendanceTest, AMemberOfTheHealthyGenerationThatDiesBeforeItComesEndsTheAttempt) {
  for (const int rank : {0, 2}) {
    world->set(members[1].incarnation, Sight::kAlive);
    Attendance attendance = at(rank, lastGeneration(true));
    world->set(members[1].incarnation, Sight::kGone);
    const auto ending = attendance.judgeNews();
    ASSERT_TRUE(ending) << rank;
    EXPECT_EQ(ending->failure.cause.rank, 1);
    EXPECT_EQ(ending->failure.cause.pid, 101);
  }
}

TEST_F(AttendanceTest, MembersThatMayStayOutAreNotWatched) {
  Attendance smaller = at(0, lastGeneration(true), 2);
  EXPECT_FALSE(vigil->watches(members[1]));
  AttemptMemory memory = lastGeneration(false);
  memory.told.insert(members[2].incarnation);
  Attendance fitting = at(0, std::move(memory), 2);
  EXPECT_TRUE(vigil->watches(members[1]));
  EXPECT_FALSE(vigil->watches(members[2]));
}

TEST_F(AttendanceTest, ANewProcessLeavesNoRoomForAMemberThatIsReplaced) {
  Attendance attendance = at(0, lastGeneration(true));
  attendance.judgeRecord(1, encodeRecord(processOf(7)));
  world->set(members[1].incarnation, Sight::kGone);
  EXPECT_FALSE(attendance.judgeNews());
  EXPECT_TRUE(attendance.leftOver().empty());
}

// A new order of ranks is in the making: the old one's rank would name another, maybe oneself.
TEST_F(AttendanceTest, AMemberThatDiesBeforeItComesHasNoRankIfRanksChange) {
  Attendance attendance = of(again(members[2]), 0, lastGeneration(true));
  world->set(members[0].incarnation, Sight::kGone);
  const auto ending = attendance.judgeNews();
  ASSERT_TRUE(ending);
  EXPECT_EQ(ending->failure.cause.rank, -1);
  EXPECT_EQ(ending->failure.cause.pid, 100);
}

TEST_F(AttendanceTest, AMemberOfABrokenGenerationCountsOnlyOnceItAnswered) {
  world->set(members[1].incarnation, Sight::kGone);
  Attendance late = at(0, lastGeneration(false));
  EXPECT_FALSE(late.judgeNews());
  world->set(members[1].incarnation, Sight::kAlive);
  Attendance early = at(0, lastGeneration(false));
  EXPECT_FALSE(early.judgeNews());
  world->set(members[1].incarnation, Sight::kGone);
  EXPECT_TRUE(early.judgeNews());
}

TEST_F(AttendanceTest, AMemberOfABrokenGenerationThatHasComeSinceCountsWhicheverIsSeenFirst) {
  world->set(members[1].incarnation, Sight::kGone);
  Attendance end_first = at(0, lastGeneration(false));
  EXPECT_FALSE(end_first.judgeNews());
  const auto ending = end_first.judgeRecord(1, encodeRecord(again(members[1])));
  ASSERT_TRUE(ending);
  EXPECT_EQ(ending->failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(ending->failure.cause.rank, 1);
  EXPECT_EQ(ending->culprit, members[1].incarnation);
  Attendance record_first = at(0, lastGeneration(false));
  EXPECT_FALSE(record_first.judgeRecord(1, encodeRecord(again(members[1]))));
  EXPECT_TRUE(record_first.judgeNews());
}

TEST_F(AttendanceTest, AFreezeSeenBeforeTheRecordDoesNotCount) {
  world->set(members[1].incarnation, Sight::kFrozen);
  Attendance attendance = at(0, lastGeneration(false));
  EXPECT_FALSE(attendance.judgeNews());
  EXPECT_FALSE(attendance.judgeRecord(1, encodeRecord(again(members[1]))));
  world->set(members[1].incarnation, Sight::kAlive);
  EXPECT_FALSE(attendance.judgeNews());
  EXPECT_EQ(attendance.leftOver().count(members[1].incarnation), 0U);
}

TEST_F(AttendanceTest, TheBrokenGenerationsOwnRecordIsLeftOver) {
  world->set(members[1].incarnation, Sight::kGone);
  Attendance attendance = at(0, lastGeneration(false));
  EXPECT_FALSE(attendance.judgeRecord(1, encodeRecord(members[1])));
  EXPECT_FALSE(attendance.judgeNews());
  EXPECT_EQ(attendance.leftOver().count(members[1].incarnation), 1U);
}

TEST_F(AttendanceTest, OthersWatchRankZeroAloneOnceItHasCome) {
  Attendance attendance = at(2, lastGeneration(true));
  EXPECT_TRUE(vigil->watches(members[0]));
  EXPECT_TRUE(vigil->watches(members[1]));
  attendance.judgeRecord(0, encodeRecord(again(members[0])));
  EXPECT_TRUE(vigil->watches(members[0]));
  EXPECT_FALSE(vigil->watches(members[1]));
}

TEST_F(AttendanceTest, AWithdrawalOfARecordSeenHereIsPassedOnAsItIs) {
  for (const FailureKind kind : {FailureKind::kAborted, FailureKind::kTimeout,
                                 FailureKind::kPeerLost, FailureKind::kPeerLeft}) {
    Attendance attendance = at(2);
    const MemberRecord leader = again(members[0]);
    attendance.judgeRecord(0, encodeRecord(leader));
    const auto ending = attendance.judgeRecord(0, withdrawn(leader, endedBy(members[1], 1, kind)));
    ASSERT_TRUE(ending);
    EXPECT_EQ(ending->failure.kind, kind);
    EXPECT_EQ(ending->failure.cause.rank, 1);
    EXPECT_EQ(attendance.endingOf(ending->failure).origin, members[1].token);
  }
}

TEST_F(AttendanceTest, AWithdrawalWithoutACauseNamesItsMember) {
  Attendance attendance = at(0);
  const MemberRecord other = again(members[1]);
  attendance.judgeRecord(1, encodeRecord(other));
  Ending ending;
  ending.failure.kind = FailureKind::kTimeout;
  ending.failure.cause.how = "rank 0 did not come";
  ending.origin = other.token;
  const auto judged = attendance.judgeRecord(1, withdrawn(other, ending));
  ASSERT_TRUE(judged);
  EXPECT_EQ(judged->failure.cause.rank, 1);
  EXPECT_EQ(judged->failure.cause.pid, 101);
}

TEST_F(AttendanceTest, WhoComesAfterTheEndWaitsUnlessItComesFromTheSameGeneration) {
  const MemberRecord leader = again(members[0]);
  const std::string notice = withdrawn(leader, endedBy(members[1], 1, FailureKind::kPeerLost));
  EXPECT_FALSE(at(2).judgeRecord(0, notice));
  EXPECT_FALSE(at(2, lastGeneration(false)).judgeRecord(0, notice));
  EXPECT_FALSE(of(processOf(9), 2, lastGeneration(false)).judgeRecord(0, notice));
  EXPECT_TRUE(at(2, lastGeneration(true)).judgeRecord(0, notice));
  const std::string late = withdrawn(leader, endedBy(leader, 0, FailureKind::kTimeout));
  EXPECT_FALSE(at(2, lastGeneration(true)).judgeRecord(0, late));
}

TEST_F(AttendanceTest, AWithdrawalAddressedToTheAttemptEndsItThoughItsRecordWasNeverSeen) {
  const MemberRecord other = again(members[1]);
  const MemberRecord self = again(members[0]);
  for (const FailureKind kind : {FailureKind::kAborted, FailureKind::kTimeout}) {
    const Ending ending = endedBy(other, 1, kind);
    Attendance attendance = of(self, 0, {});
    EXPECT_FALSE(attendance.judgeRecord(1, withdrawn(other, ending, {members[2].token})));
    const auto told =
        attendance.judgeRecord(1, withdrawn(other, ending, {members[2].token, self.token}));
    ASSERT_TRUE(told);
    EXPECT_EQ(told->failure.kind, kind);
    EXPECT_EQ(told->failure.cause.rank, 1);
  }
}

// Rank 2 was told over the links and tries again; only then rank 0, which was told too, withdraws.
TEST_F(AttendanceTest, AnEndThatWasToldIsNotToldAgainByAnother) {
  const MemberRecord leader = again(members[0]);
  const MemberRecord aborter = again(members[1]);
  const Ending abort = endedBy(aborter, 1, FailureKind::kAborted);
  Attendance first = at(2, lastGeneration(true));
  first.judgeRecord(0, encodeRecord(leader));
  first.noteRoster({leader, aborter, members[2]});
  Attendance second = at(2, first.failed(first.endingOf(abort.failure)));
  second.judgeRecord(0, encodeRecord(leader));
  EXPECT_FALSE(second.judgeRecord(0, withdrawn(leader, abort)));
  EXPECT_FALSE(second.judgeRecord(0, encodeRecord(again(leader))));
}

TEST_F(AttendanceTest, ItsOwnAbortDoesNotComeBackToARetryingMember) {
  const MemberRecord leader = again(members[0]);
  const MemberRecord self = again(members[1]);
  Attendance first = of(self, 1, {});
  const Ending abort = first.endingOf(endedBy(self, 1, FailureKind::kAborted).failure);
  EXPECT_EQ(abort.origin, self.token);
  Attendance second = of(again(self), 1, first.failed(abort));
  second.judgeRecord(0, encodeRecord(leader));
  EXPECT_FALSE(second.judgeRecord(0, withdrawn(leader, abort)));
}

// It formed the generation; another one, which ran out of time there, says so late.
TEST_F(AttendanceTest, AnAttemptThatFormedAGenerationIsNotSaidToHaveFailedTheNextOne) {
  const MemberRecord self = again(members[0]);
  const MemberRecord other = again(members[1]);
  Attendance first = of(self, 0, {});
  const MemberRecord next = again(self);
  Attendance second = of(next, 0, first.formed({self, other, members[2]}));
  const Ending late = endedBy(self, 0, FailureKind::kTimeout);
  EXPECT_FALSE(second.judgeRecord(1, withdrawn(other, late, {next.token})));
}

TEST_F(AttendanceTest, AFrozenProcessThatIsBackCountsAgain) {
  AttemptMemory memory;
  memory.told.insert(members[1].incarnation);
  Attendance attendance = at(0, std::move(memory));
  attendance.judgeRecord(1, encodeRecord(again(members[1])));
  EXPECT_FALSE(attendance.judgeNews());
  world->set(members[1].incarnation, Sight::kFrozen);
  EXPECT_TRUE(attendance.judgeNews());
}

TEST_F(AttendanceTest, AGenerationClearsWhatWasTold) {
  Attendance attendance = at(0, lastGeneration(false));
  AttemptMemory memory = attendance.failed(endedBy(members[1], 1, FailureKind::kPeerLost));
  EXPECT_FALSE(memory.told.empty());
  Attendance next = at(0, std::move(memory));
  memory = next.formed(members);
  EXPECT_TRUE(memory.told.empty());
  EXPECT_EQ(memory.settled.size(), 1U) << "its own alone";
  EXPECT_EQ(memory.members.size(), 3U);
}

}  // namespace
}  // namespace torchft_ext
