// The answer to an agreement, computed from its votes: it is not ok if the digests differ.
#include "elastic/agreements.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "cpp/elastic/elastic_world_members.h"
#include "elastic/elastic_message.h"

namespace torchft_ext {
namespace {

Vote yes(VoteDigest digest) {
  Vote vote;
  vote.ok = true;
  vote.digest = std::move(digest);
  return vote;
}

// Of members 0, 1, 2, ...
Answer answerOf(const std::vector<VoteDigest>& digests) {
  std::map<MemberId, Vote> votes;
  for (const VoteDigest& digest : digests) {
    votes[idOfMember(static_cast<int>(votes.size()))] = yes(digest);
  }
  return Agreements::answerOf(votes);
}

void expectOk(const std::vector<VoteDigest>& digests) {
  const Answer answer = answerOf(digests);
  EXPECT_TRUE(answer.ok);
  EXPECT_FALSE(answer.diverged);
}

void expectDiverged(const std::vector<VoteDigest>& digests) {
  const Answer answer = answerOf(digests);
  EXPECT_FALSE(answer.ok);
  EXPECT_TRUE(answer.diverged);
}

TEST(Agreements, ANewcomerWaitsForAPlaceUnlessOneMemberHoldsItBack) {
  std::map<MemberId, Vote> votes{{idOfMember(0), yes({})}, {idOfMember(1), yes({})}};
  votes[idOfMember(0)].waiting = {idOfMember(5), idOfMember(6)};
  votes[idOfMember(1)].held_back = {idOfMember(5)};
  EXPECT_EQ(Agreements::answerOf(votes).waiting, std::vector<MemberId>{idOfMember(6)});
}

TEST(Agreements, EqualDigestsAreOk) {
  expectOk({{"a", 0, ""}, {"a", 0, ""}, {"a", 0, ""}});
  expectOk({{"a", 0, "x"}, {"a", 0, "x"}});
}
TEST(Agreements, CommonPartsThatDifferAreNot) {
  expectDiverged({{"a", 0, ""}, {"a", 0, ""}, {"b", 0, ""}});
}
TEST(Agreements, PartsOfOneShardThatDifferAreNot) {
  expectDiverged({{"a", 0, "x"}, {"a", 1, "y"}, {"a", 0, "z"}});
}
TEST(Agreements, PartsOfOtherShardsAreNotCompared) {
  expectOk({{"a", 0, "x"}, {"a", 1, "y"}, {"a", 1, "y"}});
}
TEST(Agreements, EmptyPartsAreNotCompared) {
  expectOk({{}, {"a", 0, "x"}, {"", 0, "x"}, {"a", 0, ""}});
}

// Only the votes of members that go on count when the next view decides the answer.
TEST(Agreements, DigestsOfThoseThatGoOnDecideWhereNobodyKnowsTheAnswer) {
  const auto reportOf = [](const char* common) {
    return std::vector<AgreementReport>{{1, yes({common, 0, ""}), std::nullopt, false}};
  };
  const auto judge = [](const std::map<MemberId, std::vector<AgreementReport>>& reports) {
    return outcomesOf(1, reports).at(0).answer;
  };
  EXPECT_TRUE(judge({{idOfMember(0), reportOf("a")}, {idOfMember(1), reportOf("a")}}).ok);
  const Answer answer = judge({{idOfMember(0), reportOf("a")}, {idOfMember(1), reportOf("b")}});
  EXPECT_FALSE(answer.ok);
  EXPECT_TRUE(answer.diverged);
}

ElasticMessage voteWith(VoteDigest digest) {
  ElasticMessage message;
  message.kind = ElasticKind::kVote;
  message.votes[idOfMember(0)] = yes(std::move(digest));
  return message;
}

TEST(Agreements, DigestsTravelWithVotes) {
  for (const VoteDigest& digest :
       {VoteDigest{}, VoteDigest{"a", 0, ""}, VoteDigest{std::string(16, 'a'), 7, "x"}}) {
    const ElasticMessage message = voteWith(digest);
    const auto read = decodeElasticMessage(encodeElasticMessage(message));
    ASSERT_TRUE(read);
    EXPECT_EQ(*read, message);
  }
}
TEST(Agreements, NewcomersThatAreHeldBackTravelWithVotesAndPromises) {
  ElasticMessage vote = voteWith({});
  vote.votes[idOfMember(0)].held_back = {idOfMember(5), idOfMember(6)};
  EXPECT_EQ(decodeElasticMessage(encodeElasticMessage(vote)), vote);
  ElasticMessage promise;
  promise.kind = ElasticKind::kPromise;
  promise.promise.held_back = {idOfMember(5)};
  promise.promise.ready = true;
  EXPECT_EQ(decodeElasticMessage(encodeElasticMessage(promise)), promise);
}
TEST(Agreements, LongerDigestsAreNotRead) {
  const std::string long_part(17, 'a');
  EXPECT_FALSE(decodeElasticMessage(encodeElasticMessage(voteWith({long_part, 0, ""}))));
  EXPECT_FALSE(decodeElasticMessage(encodeElasticMessage(voteWith({"", 0, long_part}))));
}

}  // namespace
}  // namespace torchft_ext
