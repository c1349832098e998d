#include "elastic/sole_holders.h"

#include <gtest/gtest.h>

namespace torchft_ext {
namespace {

using std::chrono::seconds;
using Verdict = SoleHolders::Verdict;

class OneThatIsAlone : public testing::Test {
 protected:
  OneThatIsAlone() { holders_.set({alone_}, seconds(5)); }

  const MemberId alone_ = MemberId::random();
  const Clock::time_point begin_ = Clock::now();
  SoleHolders holders_;
};

TEST_F(OneThatIsAlone, IsWaitedForUntilItsTimeIsUp) {
  EXPECT_EQ(holders_.onFrozen(alone_, begin_), Verdict::kBegins);
  EXPECT_EQ(holders_.awaited(), std::set<MemberId>{alone_});
  EXPECT_EQ(holders_.onFrozen(alone_, begin_ + seconds(4)), Verdict::kWaits);
  EXPECT_TRUE(holders_.expired(begin_ + seconds(4)).empty());
  EXPECT_EQ(holders_.expired(begin_ + seconds(5)), std::set<MemberId>{alone_});
  EXPECT_EQ(holders_.onFrozen(alone_, begin_ + seconds(5)), Verdict::kLost);
}

TEST_F(OneThatIsAlone, HasAllItsTimeAgainOnceItAnswers) {
  holders_.onFrozen(alone_, begin_);
  holders_.forget(alone_);
  EXPECT_TRUE(holders_.awaited().empty());
  EXPECT_EQ(holders_.onFrozen(alone_, begin_ + seconds(6)), Verdict::kBegins);
}

TEST_F(OneThatIsAlone, MayBeAnybodyInANewViewUntilTheUserSaysWho) {
  const MemberId other = MemberId::random();
  holders_.onFrozen(alone_, begin_);
  holders_.beginView();
  EXPECT_TRUE(holders_.awaited().empty());  // it has come to the view
  EXPECT_EQ(holders_.onFrozen(other, begin_), Verdict::kBegins);
  holders_.set({alone_}, seconds(5));
  EXPECT_TRUE(holders_.awaited().empty());
  EXPECT_EQ(holders_.onFrozen(other, begin_), Verdict::kLost);
}

TEST_F(OneThatIsAlone, KeepsWhatIsLeftOfItsTimeInTheSameView) {
  holders_.onFrozen(alone_, begin_);
  holders_.set({alone_, MemberId::random()}, seconds(5));
  EXPECT_EQ(holders_.onFrozen(alone_, begin_ + seconds(5)), Verdict::kLost);
}

TEST_F(OneThatIsAlone, IsLostAtOnceWhereOthersHoldTheSame) {
  holders_.onFrozen(alone_, begin_);
  holders_.set({}, seconds(5));
  EXPECT_TRUE(holders_.awaited().empty());
  EXPECT_EQ(holders_.onFrozen(alone_, begin_ + seconds(1)), Verdict::kLost);
}

TEST(SoleHolders, NobodyIsOneWhereTheUserHasNeverSaidSo) {
  SoleHolders holders;
  holders.beginView();
  EXPECT_EQ(holders.onFrozen(MemberId::random(), Clock::now()), Verdict::kLost);
}

}  // namespace
}  // namespace torchft_ext
