// When an elastic job counts as one that does not get on.
#include "elastic/standstill.h"

#include <gtest/gtest.h>

#include "membership/rendezvous.h"

namespace torchft_ext {
namespace {

using std::chrono::seconds;

const MemberId kOne = MemberId::random();
const MemberId kOther = MemberId::random();
const MemberId kNew = MemberId::random();
const Setback kDisagreement{"they disagree", true};
const Setback kTrouble{"trouble", false};

// A job that goes from view to view.
class StandstillTest : public testing::Test {
 protected:
  void fail(const Setback& setback, Duration later = Duration::zero()) {
    now_ += later;
    standstill_.add(view(), setback, now_);
  }
  View view() {
    View view;
    view.number = ++number_;
    view.members = members_;
    return view;
  }
  std::optional<std::string> verdict(const MemberId& of = kOne) {
    return standstill_.takeVerdict(of);
  }

  Standstill standstill_{seconds(1)};
  std::vector<Member> members_{{kOne, 1, ""}, {kOther, 1, ""}};
  uint64_t number_ = 0;
  Clock::time_point now_ = Clock::now();
};

TEST_F(StandstillTest, ThreeDisagreementsInARowOfTheSameMembersAreAVerdict) {
  fail(kDisagreement);
  fail(kDisagreement);
  EXPECT_FALSE(verdict());
  std::swap(members_[0], members_[1]);
  fail(kDisagreement);
  EXPECT_EQ(verdict(),
            "nothing succeeded in 3 views in a row of the same 2 members, the last one view 3: "
            "they disagree");
}

TEST_F(StandstillTest, OtherCausesHaveAMinuteToPass) {
  for (int i = 0; i < 3; ++i) fail(kTrouble, seconds(20));
  EXPECT_FALSE(verdict());
  fail(kDisagreement, seconds(19));
  EXPECT_FALSE(verdict());
  fail(kTrouble, seconds(1));
  EXPECT_TRUE(verdict());
}

TEST_F(StandstillTest, OtherCausesHaveFourTimesTheJobsLimit) {
  standstill_ = Standstill(seconds(30));
  for (int i = 0; i < 12; ++i) fail(kTrouble, seconds(10));
  EXPECT_FALSE(verdict());
  fail(kTrouble, seconds(10));
  EXPECT_TRUE(verdict());
}

TEST_F(StandstillTest, AfterAVerdictTheCountBeginsAgain) {
  for (int i = 0; i < 3; ++i) fail(kDisagreement);
  EXPECT_TRUE(verdict());
  EXPECT_FALSE(verdict());
  for (int i = 0; i < 2; ++i) fail(kDisagreement);
  EXPECT_FALSE(verdict());
  fail(kDisagreement);
  EXPECT_TRUE(verdict());
}

TEST_F(StandstillTest, OtherMembersBeginTheCountAgain) {
  for (int i = 0; i < 2; ++i) fail(kDisagreement);
  members_.push_back({kNew, 3, ""});
  for (int i = 0; i < 2; ++i) fail(kDisagreement);
  EXPECT_FALSE(verdict(kNew));
}

TEST_F(StandstillTest, ASuccessBeginsTheCountAgain) {
  for (int i = 0; i < 2; ++i) fail(kDisagreement);
  standstill_.clear();
  for (int i = 0; i < 2; ++i) fail(kDisagreement);
  EXPECT_FALSE(verdict());
}

TEST_F(StandstillTest, ANewcomerAloneGivesUp) {
  standstill_.agreed(view().number);
  members_.push_back({kNew, 2, ""});
  for (int i = 0; i < 5; ++i) fail(kDisagreement);
  EXPECT_FALSE(verdict(kOne));
  EXPECT_FALSE(verdict(kOther));
  EXPECT_TRUE(verdict(kNew));
}

TEST_F(StandstillTest, ANewcomerThatHasAgreedIsNoneAnyMore) {
  members_.push_back({kNew, 2, ""});
  view();
  standstill_.agreed(view().number);
  for (int i = 0; i < 3; ++i) fail(kDisagreement);
  EXPECT_TRUE(verdict(kOne));
}

TEST_F(StandstillTest, ADisagreementIsNotHiddenByWhatComesOfIt) {
  fail(kDisagreement);
  for (int i = 0; i < 3; ++i) fail(kTrouble, seconds(60));
  const auto text = verdict();
  ASSERT_TRUE(text);
  EXPECT_TRUE(text->ends_with("view 4: they disagree")) << *text;
}

TEST_F(StandstillTest, PausesBeginWithTheSecondViewAndDoubleUpToALimit) {
  const Duration long_time = std::chrono::hours(1);
  EXPECT_EQ(standstill_.pause(long_time), Duration::zero());
  fail(kTrouble);
  EXPECT_EQ(standstill_.pause(long_time), Duration::zero());
  fail(kTrouble);
  EXPECT_EQ(standstill_.pause(long_time), Standstill::kFirstPause);
  fail(kTrouble);
  EXPECT_EQ(standstill_.pause(long_time), 2 * Standstill::kFirstPause);
  for (int i = 0; i < 50; ++i) fail(kTrouble);
  EXPECT_EQ(standstill_.pause(long_time), Standstill::kLongestPause);
  EXPECT_EQ(standstill_.pause(Duration::max()), Standstill::kLongestPause);
}

TEST_F(StandstillTest, APauseTakesAQuarterOfTheTimeThatIsLeftAtMost) {
  for (int i = 0; i < 10; ++i) fail(kTrouble);
  EXPECT_EQ(standstill_.pause(seconds(4)), Duration(seconds(1)));
  EXPECT_EQ(standstill_.pause(Duration::zero()), Duration::zero());
}

TEST_F(StandstillTest, LossesOfMembersThatComeBackInEveryViewAreAVerdictAfterAMinute) {
  for (const auto kind : {FailureKind::kPeerLost, FailureKind::kTimeout}) {
    for (int i = 0; i < 3; ++i)
      fail(*setbackOf(kind, "", "trouble", /*view_over=*/true), seconds(20));
    EXPECT_FALSE(verdict()) << toString(kind);
    fail(*setbackOf(kind, "", "trouble", /*view_over=*/true), seconds(20));
    EXPECT_TRUE(verdict()) << toString(kind);
  }
}

TEST_F(StandstillTest, ALossThatTheNextViewIsWithoutCountsForNothing) {
  const Setback loss = *setbackOf(FailureKind::kPeerLost, "", "trouble", /*view_over=*/false);
  for (int i = 0; i < 10; ++i) {
    fail(loss, seconds(60));
    members_.push_back({MemberId::random(), number_ + 1, ""});
    members_.erase(members_.begin());
    EXPECT_FALSE(verdict(members_.front().id));
  }
}

TEST(Setback, LateMembersOfAViewThatDoesNotFormAreNone) {
  EXPECT_FALSE(setbackOfForming(FailureKind::kTimeout, "", "", /*view_over=*/false));
  EXPECT_TRUE(setbackOfForming(FailureKind::kPeerLost, "", "", /*view_over=*/false));
  EXPECT_TRUE(setbackOfForming(FailureKind::kMismatch, "", "", /*view_over=*/true));
}

TEST(Setback, MembersThatLeaveAndAbortsAreNone) {
  for (const auto kind : {FailureKind::kPeerLeft, FailureKind::kAborted}) {
    EXPECT_FALSE(setbackOf(kind, "", "", /*view_over=*/false)) << toString(kind);
  }
}

TEST(Setback, WhatTheViewsEndBringsAboutIsNone) {
  for (const auto kind : {FailureKind::kStoreLost, FailureKind::kConnectionLost}) {
    EXPECT_FALSE(setbackOf(kind, "", "", /*view_over=*/true)) << toString(kind);
    EXPECT_TRUE(setbackOf(kind, "", "", /*view_over=*/false)) << toString(kind);
  }
}

TEST(Setback, OperationsAndNamesThatDifferAreDisagreements) {
  const std::string names = std::string(kOtherPurpose) + "rank 0 forms 'a'";
  EXPECT_TRUE(setbackOf(FailureKind::kMismatch, "", "", true)->is_disagreement);
  EXPECT_TRUE(setbackOf(FailureKind::kRendezvous, names, "", true)->is_disagreement);
  EXPECT_FALSE(setbackOf(FailureKind::kRendezvous, "duplicate rank", "", true)->is_disagreement);
  EXPECT_FALSE(setbackOf(FailureKind::kInternal, "", "", true)->is_disagreement);
}

}  // namespace
}  // namespace torchft_ext
