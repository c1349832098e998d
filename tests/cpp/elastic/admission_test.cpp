#include "elastic/admission.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "membership/records.h"

namespace torchft_ext {
namespace {

using std::chrono::seconds;

constexpr seconds kBackoff{60};

Member memberAt(uint8_t number, const std::string& ip) {
  MemberRecord record;
  record.host = "all have one name";
  record.addresses = {*SocketAddress::fromNumeric(ip, 7000 + number)};
  Member member;
  member.id.bytes[0] = number;
  member.record = encodeRecord(record);
  return member;
}

class AdmissionTest : public testing::Test {
 protected:
  std::set<MemberId> heldBack(const std::vector<Member>& members,
                              const std::vector<Member>& newcomers, seconds after = seconds(0)) {
    std::set<MemberId> all;
    for (const auto& some : {members, newcomers}) {
      for (const Member& member : some) all.insert(member.id);
    }
    for (const Member& newcomer : newcomers) admission_.hasReached(newcomer.id, all);
    return admission_.heldBack(members, newcomers, begin_ + after);
  }

  const Member a_ = memberAt(1, "10.0.0.1");
  const Member b_ = memberAt(2, "10.0.0.2");
  const Member c_ = memberAt(3, "10.0.0.3");
  const Member b_again_ = memberAt(4, "10.0.0.2");
  const Member a_again_ = memberAt(5, "10.0.0.1");
  const Clock::time_point begin_ = Clock::now();
  Admission admission_{kBackoff};
};

TEST_F(AdmissionTest, HoldsNobodyBackWithoutAReason) {
  EXPECT_TRUE(heldBack({a_, c_}, {b_}).empty());
}

TEST_F(AdmissionTest, HoldsBackTheHostThatCouldNotConnectUnderWhateverId) {
  EXPECT_EQ(admission_.couldNotConnect(b_, a_, begin_), "10.0.0.1 and 10.0.0.2");
  EXPECT_EQ(heldBack({a_, c_}, {b_again_}), std::set<MemberId>{b_again_.id});
  EXPECT_EQ(heldBack({b_, c_}, {a_again_}), std::set<MemberId>{a_again_.id});
}

TEST_F(AdmissionTest, TakesItInWhereNoMemberIsOnTheOtherHost) {
  admission_.couldNotConnect(a_, b_, begin_);
  EXPECT_TRUE(heldBack({c_}, {b_again_}).empty());
}

TEST_F(AdmissionTest, HoldsBackOneOfTwoNewcomersThatCouldNotConnect) {
  admission_.couldNotConnect(a_, b_, begin_);
  EXPECT_EQ(heldBack({c_}, {b_again_, a_again_}), std::set<MemberId>{a_again_.id});
}

TEST_F(AdmissionTest, EndsWithItsTime) {
  admission_.couldNotConnect(a_, b_, begin_);
  EXPECT_FALSE(heldBack({a_}, {b_again_}, kBackoff - seconds(1)).empty());
  EXPECT_TRUE(heldBack({a_}, {b_again_}, kBackoff).empty());
  EXPECT_TRUE(heldBack({a_}, {b_again_}).empty());  // it is forgotten
}

TEST_F(AdmissionTest, BeginsAnewWithEachViewThatComesToNothingAndIsToldOnce) {
  admission_.couldNotConnect(a_, b_, begin_);
  EXPECT_EQ(admission_.couldNotConnect(a_, b_, begin_ + seconds(30)), "");
  EXPECT_FALSE(heldBack({a_}, {b_again_}, seconds(89)).empty());
  EXPECT_NE(admission_.couldNotConnect(a_, b_, begin_ + seconds(90)), "");
}

// They share whatever was wrong, and so would all newcomers.
TEST_F(AdmissionTest, HoldsNobodyBackForALinkThatBrokeOnceHoweverManyMembersItParts) {
  EXPECT_TRUE(admission_.hasBroken(a_, b_, begin_).empty());
  EXPECT_TRUE(admission_.hasBroken(a_, b_again_, begin_ + seconds(4)).empty());
  EXPECT_TRUE(heldBack({a_, c_}, {b_again_}).empty());
}

TEST_F(AdmissionTest, HoldsBackTheHostWhoseLinkBreaksAgainSoon) {
  admission_.hasBroken(a_, b_, begin_);
  EXPECT_EQ(admission_.hasBroken(b_again_, a_, begin_ + seconds(59)), "10.0.0.1 and 10.0.0.2");
  EXPECT_EQ(heldBack({a_, c_}, {b_again_}, seconds(118)), std::set<MemberId>{b_again_.id});
}

TEST_F(AdmissionTest, ForgetsABreakWithItsTime) {
  admission_.hasBroken(a_, b_, begin_);
  EXPECT_TRUE(admission_.hasBroken(a_, b_again_, begin_ + seconds(60)).empty());
}

TEST_F(AdmissionTest, HoldsNobodyBackForTwoOfOneHost) {
  EXPECT_EQ(admission_.couldNotConnect(b_, b_again_, begin_), "");
  EXPECT_TRUE(heldBack({b_}, {b_again_}).empty());
}

TEST_F(AdmissionTest, HoldsNobodyBackForARecordThatMakesNoSense) {
  Member odd = a_;
  odd.record = "?";
  EXPECT_EQ(admission_.couldNotConnect(odd, b_, begin_), "");
}

// ---- the way to others

TEST_F(AdmissionTest, HoldsBackWhoHasNotReachedAllMembers) {
  EXPECT_FALSE(admission_.heldBack({a_, c_}, {b_}, begin_).empty());
  admission_.hasReached(b_.id, {a_.id});
  EXPECT_FALSE(admission_.heldBack({a_, c_}, {b_}, begin_).empty());
  admission_.hasReached(b_.id, {a_.id, c_.id});
  EXPECT_TRUE(admission_.heldBack({a_, c_}, {b_}, begin_).empty());
}

TEST_F(AdmissionTest, TakesInOneOfTwoNewcomersThatHaveNotMet) {
  admission_.hasReached(b_.id, {a_.id});
  admission_.hasReached(c_.id, {a_.id});
  EXPECT_EQ(admission_.heldBack({a_}, {b_, c_}, begin_), std::set<MemberId>{c_.id});
  admission_.hasReached(b_.id, {a_.id, c_.id});  // by the word of either
  EXPECT_TRUE(admission_.heldBack({a_}, {b_, c_}, begin_).empty());
}

TEST_F(AdmissionTest, ForgetsWhatANewcomerSaidThatDoesNotWaitAnyMore) {
  admission_.hasReached(b_.id, {a_.id});
  admission_.heldBack({a_}, {}, begin_);
  EXPECT_FALSE(admission_.heldBack({a_}, {b_}, begin_).empty());
}

}  // namespace
}  // namespace torchft_ext
