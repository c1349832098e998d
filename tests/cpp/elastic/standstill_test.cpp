// When an elastic job counts as one that does not get on.
#include "elastic/standstill.h"

#include <gtest/gtest.h>

namespace torchft_ext {
namespace {

View viewOf(uint64_t number, const std::vector<MemberId>& ids) {
  View view;
  view.number = number;
  for (const MemberId& id : ids) view.members.push_back({id, 1, ""});
  return view;
}

const MemberId kOne = MemberId::random();
const MemberId kOther = MemberId::random();
const MemberId kThird = MemberId::random();

TEST(Standstill, TheThirdViewOfTheSameMembersInARowIsHopeless) {
  Standstill standstill;
  standstill.add(viewOf(1, {kOne, kOther}), "a");
  standstill.add(viewOf(2, {kOne, kOther}), "b");
  EXPECT_FALSE(standstill.isHopeless());
  standstill.add(viewOf(4, {kOther, kOne}), "c");  // in another order
  EXPECT_TRUE(standstill.isHopeless());
  EXPECT_EQ(standstill.describe(),
            "nothing succeeded in 3 views in a row of the same 2 members, the last one view 4: c");
}

TEST(Standstill, AVerdictIsTakenOnceForEachView) {
  Standstill standstill;
  for (const uint64_t number : {1, 2}) standstill.add(viewOf(number, {kOne}), "");
  EXPECT_FALSE(standstill.takeVerdict());
  standstill.add(viewOf(3, {kOne}), "");
  EXPECT_TRUE(standstill.takeVerdict());
  EXPECT_FALSE(standstill.takeVerdict());
  standstill.add(viewOf(4, {kOne}), "");
  EXPECT_TRUE(standstill.takeVerdict());
}

TEST(Standstill, OtherMembersBeginTheCountAgain) {
  Standstill standstill;
  standstill.add(viewOf(1, {kOne, kOther}), "");
  standstill.add(viewOf(2, {kOne, kOther}), "");
  standstill.add(viewOf(3, {kOne, kThird}), "");
  standstill.add(viewOf(4, {kOne, kThird}), "");
  EXPECT_FALSE(standstill.isHopeless());
}

TEST(Standstill, ASuccessBeginsTheCountAgain) {
  Standstill standstill;
  for (const uint64_t number : {1, 2}) standstill.add(viewOf(number, {kOne}), "");
  standstill.clear();
  for (const uint64_t number : {3, 4}) standstill.add(viewOf(number, {kOne}), "");
  EXPECT_FALSE(standstill.isHopeless());
}

TEST(Standstill, AConsequenceDoesNotHideTheCause) {
  Standstill standstill;
  standstill.add(viewOf(1, {kOne}), "it gave up", /*is_consequence=*/true);
  standstill.add(viewOf(2, {kOne}), "the cause");
  standstill.add(viewOf(3, {kOne}), "it left", /*is_consequence=*/true);
  EXPECT_TRUE(standstill.describe().ends_with("view 3: the cause")) << standstill.describe();
}

TEST(Standstill, PausesBeginWithTheSecondViewAndDoubleUpToALimit) {
  Standstill standstill;
  EXPECT_EQ(standstill.pause(), Duration::zero());
  standstill.add(viewOf(1, {kOne}), "");
  EXPECT_EQ(standstill.pause(), Duration::zero());
  standstill.add(viewOf(2, {kOne}), "");
  EXPECT_EQ(standstill.pause(), Standstill::kFirstPause);
  standstill.add(viewOf(3, {kOne}), "");
  EXPECT_EQ(standstill.pause(), 2 * Standstill::kFirstPause);
  for (uint64_t number = 4; number < 50; ++number) standstill.add(viewOf(number, {kOne}), "");
  EXPECT_EQ(standstill.pause(), Standstill::kLongestPause);
}

}  // namespace
}  // namespace torchft_ext
