// Who has to prove what on a connection between members of a job.
#include "elastic/member_keys.h"

#include <gtest/gtest.h>

#include <string>

namespace torchft_ext {
namespace {

MemberId idOf(uint8_t number) {
  MemberId id;
  id.bytes[0] = number;
  return id;
}

const Lineage kLineage = Lineage::random();
const JobSecret kJob = JobSecret::random();

// Of members {number, since}.
View viewOf(uint64_t number, const std::vector<std::pair<uint8_t, uint64_t>>& members) {
  View view;
  view.lineage = kLineage;
  view.number = number;
  view.secret.bytes[0] = static_cast<uint8_t>(100 + number);
  for (const auto& [id, since] : members) view.members.push_back({idOf(id), since, "where"});
  return view;
}

MemberKeys keysOf(uint8_t self, const std::vector<View>& views) {
  MemberKeys keys;
  keys.setJob(kJob);
  for (const View& view : views) keys.enter(view, idOf(self));
  return keys;
}

ProvedConnection connectionOf(uint8_t connector, uint8_t acceptor, const ViewName& view) {
  return {Challenge::random(), Challenge::random(), idOf(acceptor), idOf(connector), view};
}

// Do both ends come to trust each other, as MemberNetwork has them talk?
bool meet(uint8_t connector, const MemberKeys& theirs, uint8_t acceptor, const MemberKeys& ours) {
  const ProvedConnection connection =
      connectionOf(connector, acceptor, theirs.viewFor(ours.newest()));
  return ours.provedBy(ConnectionEnd::kConnector, connection,
                       theirs.prove(ConnectionEnd::kConnector, connection)) &&
         theirs.provedBy(ConnectionEnd::kAcceptor, connection,
                         ours.prove(ConnectionEnd::kAcceptor, connection));
}

const View kFirst = viewOf(1, {{1, 1}, {2, 1}});
const View kSecond = viewOf(2, {{1, 1}, {2, 1}});
const View kThird = viewOf(3, {{1, 1}, {2, 1}, {3, 3}});
const View kFourth = viewOf(4, {{1, 1}, {3, 3}});

TEST(MemberKeys, MembersOfOneViewMeet) {
  EXPECT_TRUE(meet(2, keysOf(2, {kFirst, kSecond}), 1, keysOf(1, {kFirst, kSecond})));
}

TEST(MemberKeys, WhoDoesNotKnowTheJobsSecretMeetsNobody) {
  MemberKeys stranger;
  stranger.setJob(JobSecret::random());
  EXPECT_FALSE(meet(7, stranger, 1, keysOf(1, {kFirst})));
  EXPECT_FALSE(meet(1, keysOf(1, {kFirst}), 7, stranger));
}

TEST(MemberKeys, TheJobsSecretAloneDoesForANewcomer) {
  EXPECT_TRUE(meet(3, keysOf(3, {}), 1, keysOf(1, {kFirst, kSecond})));
  EXPECT_TRUE(meet(1, keysOf(1, {kFirst, kSecond, kThird}), 3, keysOf(3, {})));
}

TEST(MemberKeys, TheJobsSecretAloneDoesNotPassForAMember) {
  const MemberKeys newcomer = keysOf(2, {});
  EXPECT_FALSE(meet(2, newcomer, 1, keysOf(1, {kFirst, kSecond})));
  EXPECT_FALSE(meet(1, keysOf(1, {kFirst, kSecond}), 2, newcomer));
}

TEST(MemberKeys, AnOldViewsSecretDoesNotPassForAMember) {
  const View third = viewOf(3, {{1, 1}, {2, 1}});
  const MemberKeys member = keysOf(1, {kFirst, kSecond, third});
  const MemberKeys left_out = keysOf(2, {kFirst});  // or who has read the founding
  const ProvedConnection to_it = connectionOf(2, 1, {kLineage, 1});
  EXPECT_FALSE(member.provedBy(ConnectionEnd::kConnector, to_it,
                               left_out.prove(ConnectionEnd::kConnector, to_it)));
  const ProvedConnection from_it = connectionOf(1, 2, member.viewFor({kLineage, 1}));
  EXPECT_FALSE(member.provedBy(ConnectionEnd::kAcceptor, from_it,
                               left_out.prove(ConnectionEnd::kAcceptor, from_it)));
}

// On a connection that stands.
TEST(MemberKeys, TheJobsSecretDoesOnlyForTheViewThatTookTheMemberIn) {
  MemberKeys keys = keysOf(1, {kFirst, kSecond, kThird});
  const ProvedConnection newcomers = connectionOf(3, 1, keysOf(3, {}).viewFor(keys.newest()));
  const auto by = keys.provedBy(ConnectionEnd::kConnector, newcomers,
                                keysOf(3, {}).prove(ConnectionEnd::kConnector, newcomers));
  ASSERT_TRUE(by);
  EXPECT_TRUE(keys.stillHolds(idOf(3), *by));
  keys.enter(kFourth, idOf(1));
  EXPECT_FALSE(keys.stillHolds(idOf(3), *by));
  EXPECT_TRUE(keys.stillHolds(idOf(3), {kLineage, 3}));
  EXPECT_TRUE(keys.stillHolds(idOf(2), *by));  // it is no member any more
}

// Who has been left out knows one, and may come under the id of a newcomer.
TEST(MemberKeys, AViewFromBeforeTheMemberCameDoesNotHoldOnAStandingConnection) {
  const View third = viewOf(3, {{1, 1}, {3, 3}});
  MemberKeys keys = keysOf(1, {kFirst, kSecond, third});
  const MemberKeys left_out = keysOf(2, {kFirst, kSecond});
  const ProvedConnection connection = connectionOf(3, 1, {kLineage, 2});
  const auto by = keys.provedBy(ConnectionEnd::kConnector, connection,
                                left_out.prove(ConnectionEnd::kConnector, connection));
  ASSERT_TRUE(by);  // a newcomer has to prove nothing yet
  keys.enter(kFourth, idOf(1));
  EXPECT_FALSE(keys.stillHolds(idOf(3), *by));
  EXPECT_FALSE(keys.stillHolds(idOf(3), {Lineage::random(), 3}));
  EXPECT_TRUE(keys.stillHolds(idOf(3), {kLineage, 3}));
}

TEST(MemberKeys, TheFoundingsSecretDoesUntilTheThirdView) {
  MemberKeys keys = keysOf(1, {kFirst, kSecond});
  EXPECT_TRUE(keys.stillHolds(idOf(2), {kLineage, 1}));
  EXPECT_TRUE(keys.stillHolds(idOf(2), {}));
  keys.enter(kThird, idOf(1));
  EXPECT_FALSE(keys.stillHolds(idOf(2), {kLineage, 1}));
  EXPECT_TRUE(keys.stillHolds(idOf(2), {kLineage, 2}));
}

TEST(MemberKeys, AnotherViewsSecretDoesNotPassForAMember) {
  View other = kSecond;
  other.secret.bytes[1] ^= 1U;
  EXPECT_FALSE(meet(2, keysOf(2, {kFirst, other}), 1, keysOf(1, {kFirst, kSecond})));
}

TEST(MemberKeys, WhoIsAheadMeetsWhoIsBehind) {
  const MemberKeys ahead = keysOf(1, {kFirst, kSecond, kThird, kFourth});
  for (const MemberKeys& behind : {keysOf(2, {kFirst, kSecond}), keysOf(2, {kFirst})}) {
    EXPECT_TRUE(meet(1, ahead, 2, behind));
    EXPECT_TRUE(meet(2, behind, 1, ahead));
  }
}

TEST(MemberKeys, WhoWentOnAloneMeetsTheMembersOfItsOldLineage) {
  View alone = viewOf(3, {{2, 1}});
  alone.lineage = Lineage::random();
  const MemberKeys parted = keysOf(2, {kFirst, kSecond, alone});
  EXPECT_TRUE(meet(2, parted, 1, keysOf(1, {kFirst, kSecond, kThird})));
  EXPECT_TRUE(meet(1, keysOf(1, {kFirst, kSecond}), 2, parted));
  EXPECT_TRUE(meet(1, keysOf(1, {kFirst, kSecond, kThird}), 2, parted));
}

TEST(MemberKeys, AProofIsOfOneEndAndOneConnection) {
  const MemberKeys keys = keysOf(1, {kFirst, kSecond});
  const ProvedConnection connection = connectionOf(2, 1, keys.newest());
  const ConnectionProof proof =
      keysOf(2, {kFirst, kSecond}).prove(ConnectionEnd::kConnector, connection);
  EXPECT_TRUE(keys.provedBy(ConnectionEnd::kConnector, connection, proof));
  EXPECT_FALSE(keys.provedBy(ConnectionEnd::kAcceptor, connection, proof));
  const ProvedConnection another = connectionOf(2, 1, keys.newest());
  EXPECT_FALSE(keys.provedBy(ConnectionEnd::kConnector, another, proof));
}

TEST(MemberKeys, AnotherProcessUnderAMembersIdContradictsTheRoster) {
  const MemberKeys keys = keysOf(1, {kFirst});
  EXPECT_FALSE(keys.contradictsRoster({idOf(2), 0, "where"}));
  EXPECT_TRUE(keys.contradictsRoster({idOf(2), 0, "elsewhere"}));
  EXPECT_FALSE(keys.contradictsRoster({idOf(9), 0, "elsewhere"}));
}

TEST(MemberKeys, KeepsTheNewestViewsAlone) {
  MemberKeys keys = keysOf(1, {});
  const uint64_t last = MemberKeys::kMostViews + 10;
  for (uint64_t number = 1; number <= last; ++number) {
    keys.enter(viewOf(number, {{1, 1}}), idOf(1));
  }
  EXPECT_EQ(keys.viewFor({kLineage, last - MemberKeys::kMostViews + 1}).number,
            last - MemberKeys::kMostViews + 1);
  EXPECT_EQ(keys.viewFor({kLineage, 1}).number, last - 1);
}

TEST(MemberKeys, WhatIsSaidOnAConnectionReadsAsItWasWritten) {
  const ConnectionQuestion question{Challenge::random(), {kLineage, 7}};
  EXPECT_EQ(decodeQuestion(encodeQuestion(question))->newest, question.newest);
  ConnectionClaim claim;
  claim.member = {idOf(3), 2, "where"};
  claim.view = {kLineage, 9};
  EXPECT_EQ(decodeClaim(encodeClaim(claim))->member, claim.member);
  EXPECT_FALSE(decodeClaim(encodeClaim(claim) + "x"));
  EXPECT_FALSE(decodeQuestion("short"));
  EXPECT_FALSE(decodeProof("short"));
}

}  // namespace
}  // namespace torchft_ext
