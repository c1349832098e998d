#include "torchft_ext/failure.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

namespace torchft_ext {
namespace {

using std::chrono::milliseconds;

Failure lostPeer() {
  Failure failure;
  failure.kind = FailureKind::kPeerLost;
  failure.cause = {6, -1, "b", 812, "its process ended"};
  failure.group = "dp0";
  failure.generation = 5;
  failure.rank = 3;
  failure.size = 8;
  failure.op = "allreduce";
  failure.seq = 42;
  failure.elapsed = milliseconds(13);
  failure.limit = std::chrono::seconds(30);
  return failure;
}

TEST(Failure, NamesOperationPlaceCauseTimeAndNextStep) {
  EXPECT_EQ(
      lostPeer().describe(),
      "allreduce #42 on 'dp0' (rank 3/8, generation 5): rank 6 (host b, pid 812): its process "
      "ended, 0.013 s into the allreduce (Connection closed by peer); begin a new generation with "
      "configure(), without rank 6");
}

TEST(Failure, LeavesOutWhatIsNotKnown) {
  Failure failure;
  failure.kind = FailureKind::kPeerLost;
  failure.cause.rank = 6;
  EXPECT_EQ(
      failure.describe(),
      "rank 6: peer lost (Connection closed by peer); begin a new generation with configure(), "
      "without rank 6");
}

TEST(Failure, NamesTheGroupWhenNoticedBetweenOperations) {
  Failure failure = lostPeer();
  failure.op.clear();
  failure.seq = -1;
  EXPECT_TRUE(failure.describe().starts_with("group 'dp0' (rank 3/8, generation 5): rank 6"))
      << failure.describe();
}

TEST(Failure, NamesTheLimitOfATimeoutAndTheOperationOnce) {
  Failure failure = lostPeer();
  failure.kind = FailureKind::kTimeout;
  failure.cause = {3, -1, "", 7, "allreduce #42 did not complete within 30 s"};
  failure.elapsed = milliseconds(30004);
  EXPECT_EQ(failure.describe(),
            "allreduce #42 on 'dp0' (rank 3/8, generation 5): did not complete within 30 s, "
            "30.004 s into the allreduce (timed out after a timeout of 30 s: Timed out waiting "
            "30000ms); begin a new generation with configure()");
}

TEST(Failure, SaysWhoIsToCorrectWhatAnotherRankCannotDo) {
  Failure failure = lostPeer();
  failure.kind = FailureKind::kRendezvous;
  EXPECT_TRUE(failure.describe().ends_with(
      "; correct this on rank 6, then call configure() again on all ranks"))
      << failure.describe();
  failure.cause.rank = failure.rank;
  EXPECT_TRUE(failure.describe().ends_with("; correct this, then call configure() again"))
      << failure.describe();
}

TEST(Failure, GivesWhatOthersSaidOfThisRankASubject) {
  Failure failure = lostPeer();
  failure.kind = FailureKind::kMismatch;
  failure.cause = {3, -1, "", -1, "it issued broadcast, while rank 2 issued allreduce"};
  EXPECT_EQ(
      failure.describe().find("allreduce #42 on 'dp0' (rank 3/8, generation 5): this rank: it "
                              "issued broadcast, while"),
      0u)
      << failure.describe();
}

TEST(Failure, KeepsTheOperationThatTimedOutWhenSeenFromAnotherOne) {
  Failure failure = lostPeer();
  failure.kind = FailureKind::kTimeout;
  failure.cause.how = "send #41 did not complete within 5 s";
  EXPECT_NE(
      failure.describe().find("rank 6 (host b, pid 812): send #41 did not complete within 5 s"),
      std::string::npos);
}

TEST(Failure, DoesNotCallAnOperationTimedOutThatAnotherOnesTimeoutEnded) {
  Failure failure = lostPeer();
  failure.kind = FailureKind::kTimeout;
  failure.cause.how = "send #41 did not complete within 5 s";
  const std::string text = failure.describe();
  EXPECT_NE(text.find("(timed out after a timeout of rank 6)"), std::string::npos) << text;
  EXPECT_EQ(text.find("Timed out waiting"), std::string::npos) << text;
}

TEST(Failure, HasTheWordsThatCallersMatchOnce) {
  const std::map<FailureKind, std::string> words{
      {FailureKind::kPeerLost, " closed "},
      {FailureKind::kPeerLeft, " closed "},
      {FailureKind::kConnectionLost, " closed "},
      {FailureKind::kTimeout, " timeout "},
      {FailureKind::kAborted, "communicator was aborted"},
      {FailureKind::kMismatch, "mismatch"}};
  for (const auto& [kind, word] : words) {
    Failure failure = lostPeer();
    failure.kind = kind;
    const std::string text = failure.describe();
    EXPECT_NE(text.find(word), std::string::npos) << text;
    EXPECT_EQ(text.find(word), text.rfind(word)) << text;
  }
}

TEST(Failure, NamesBothEndsOfALostConnection) {
  Failure failure = lostPeer();
  failure.kind = FailureKind::kConnectionLost;
  failure.cause.other_rank = 2;
  failure.cause.how = "connection reset";
  const std::string text = failure.describe();
  EXPECT_NE(
      text.find("the connection between rank 6 (host b, pid 812) and rank 2: connection reset"),
      std::string::npos);
  EXPECT_EQ(text.find("without rank"), std::string::npos);
}

TEST(Failure, OfAGroupThatIsShutDownAdvisesAnotherGroup) {
  Failure failure = lostPeer();
  failure.kind = FailureKind::kAborted;
  failure.cause = {3, -1, "", -1, "the group was shut down"};
  failure.needs_new_group = true;
  EXPECT_TRUE(failure.describe().ends_with("; make a new group")) << failure.describe();
  EXPECT_EQ(failure.describe().find("configure()"), std::string::npos) << failure.describe();
}

TEST(Failure, OfAGroupInAnElasticJobAdvisesWhatBeginsItAnew) {
  Failure failure = lostPeer();
  failure.in_job = InJob::kFollows;
  EXPECT_TRUE(failure.describe().ends_with(
      "; elastic.steps() goes on by itself; a loop of your own calls job.recover()"))
      << failure.describe();
  failure.in_job = InJob::kOfOneView;
  EXPECT_TRUE(failure.describe().ends_with(
      " calls job.recover(); make this group anew in the next "
      "view, in build= of elastic.steps(), or have job.manage() do so"))
      << failure.describe();
  failure.in_job = InJob::kMadeAnew;
  for (const bool is_shut_down : {false, true}) {  // as the group of a view that is over is
    failure.needs_new_group = is_shut_down;
    EXPECT_TRUE(failure.describe().ends_with(
        " calls job.recover(), and take the group that it makes from job.managed_group()"))
        << failure.describe();
  }
}

TEST(Failure, EveryKindHasANameAndANextStep) {
  std::set<std::string> names;
  for (uint8_t number = 1; number <= 9; ++number) {
    Failure failure;
    failure.kind = static_cast<FailureKind>(number);
    names.insert(toString(failure.kind));
    EXPECT_NE(failure.describe().find("configure()"), std::string::npos) << failure.describe();
  }
  EXPECT_EQ(names.size(), 9U);
}

TEST(Failure, AKindFromALaterVersionIsStillDescribed) {
  Failure failure;
  failure.kind = static_cast<FailureKind>(200);
  EXPECT_EQ(failure.describe(), "unknown failure; begin a new generation with configure()");
}

TEST(FormatSeconds, GivesMillisecondsWithoutTrailingZeros) {
  EXPECT_EQ(formatSeconds(milliseconds(13)), "0.013 s");
  EXPECT_EQ(formatSeconds(milliseconds(1500)), "1.5 s");
  EXPECT_EQ(formatSeconds(std::chrono::seconds(30)), "30 s");
  EXPECT_EQ(formatSeconds(std::chrono::seconds(0)), "0 s");
  EXPECT_EQ(formatSeconds(std::chrono::microseconds(3)), "0.001 s");
}

}  // namespace
}  // namespace torchft_ext
