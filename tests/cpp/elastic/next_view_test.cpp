// Whom a proposer takes into the next view.
#include "elastic/next_view.h"

#include <gtest/gtest.h>

#include <vector>

namespace torchft_ext {
namespace {

MemberId idOf(uint8_t number) {
  MemberId id;
  id.bytes[0] = number;
  return id;
}

View viewOf(uint8_t size) {
  View view;
  view.lineage.bytes[0] = 1;
  view.number = 1;
  for (uint8_t i = 1; i <= size; ++i) {
    view.members.push_back({idOf(i), 1, {}});
    view.voters.push_back(idOf(i));
  }
  return view;
}

ElasticRules rules(int min_size = 1) {
  ElasticRules rules;
  rules.min_size = min_size;
  return rules;
}

TEST(NextView, IsWithoutTheLaterOfTwoThatCannotConnect) {
  std::map<MemberId, Promise> promises = {{idOf(1), {}}, {idOf(2), {}}, {idOf(3), {}}};
  promises[idOf(1)].cut = {{idOf(1), idOf(2)}};
  EXPECT_EQ(idsOf(nextView(viewOf(3), promises, {}, rules()).members),
            (std::vector<MemberId>{idOf(1), idOf(3)}));
}

// Else a member that promised and froze takes the one along that lost its connection to it.
TEST(NextView, KeepsWhoCannotConnectToOneThatIsGone) {
  std::map<MemberId, Promise> promises = {{idOf(1), {}}, {idOf(2), {}}};
  promises[idOf(2)].cut = {{idOf(1), idOf(2)}};
  EXPECT_EQ(idsOf(nextView(viewOf(3), promises, {idOf(1), idOf(3)}, rules()).members),
            std::vector<MemberId>{idOf(2)});
}

TEST(NextView, KeepsWhoCannotConnectToOneThatLeaves) {
  std::map<MemberId, Promise> promises = {{idOf(1), {}}, {idOf(2), {}}};
  promises[idOf(1)].leaving = true;
  promises[idOf(2)].cut = {{idOf(1), idOf(2)}};
  EXPECT_EQ(idsOf(nextView(viewOf(2), promises, {}, rules()).members),
            std::vector<MemberId>{idOf(2)});
}

TEST(NextView, KeepsWhoCannotConnectToOneThatIsLeftOutAsAbsent) {
  std::map<MemberId, Promise> promises = {{idOf(1), {}}, {idOf(2), {}}, {idOf(3), {}}};
  promises[idOf(2)].absent = {idOf(1)};
  promises[idOf(2)].ready = promises[idOf(3)].ready = true;
  promises[idOf(3)].cut = {{idOf(1), idOf(3)}};
  EXPECT_EQ(idsOf(nextView(viewOf(3), promises, {}, rules()).members),
            (std::vector<MemberId>{idOf(2), idOf(3)}));
}

TEST(NextView, IsWithoutANewcomerThatOnePromiserHoldsBack) {
  std::map<MemberId, Promise> promises = {{idOf(1), {}}, {idOf(2), {}}};
  promises[idOf(1)].waiting = {{idOf(3), 0, {}}, {idOf(4), 0, {}}};
  promises[idOf(2)].waiting = {{idOf(3), 0, {}}};
  promises[idOf(2)].held_back = {idOf(3)};
  EXPECT_EQ(idsOf(nextView(viewOf(2), promises, {}, rules()).members),
            (std::vector<MemberId>{idOf(1), idOf(2), idOf(4)}));
}

// Members 1 to `ready` await a view; the first of them calls all others absent.
std::map<MemberId, Promise> waitingFor(uint8_t size, uint8_t ready) {
  std::map<MemberId, Promise> promises;
  for (uint8_t i = 1; i <= size; ++i) {
    promises[idOf(i)].ready = i <= ready;
    if (i > 1) promises[idOf(1)].absent.push_back(idOf(i));
  }
  return promises;
}

size_t sizeAfter(const View& base, const std::map<MemberId, Promise>& promises, int min_size = 1) {
  return nextView(base, promises, {}, rules(min_size)).members.size();
}

TEST(NextView, IsWithoutTheAbsentWhereMoreThanHalfAreReady) {
  EXPECT_EQ(sizeAfter(viewOf(3), waitingFor(3, 2)), 2U);
  EXPECT_EQ(sizeAfter(viewOf(5), waitingFor(5, 3)), 3U);
  EXPECT_EQ(sizeAfter(viewOf(5), waitingFor(5, 2)), 5U);
  EXPECT_EQ(sizeAfter(viewOf(4), waitingFor(4, 1)), 4U);
}

TEST(NextView, IsWithoutAnAbsentHalfOnlyWithAWitness) {
  View base = viewOf(4);
  EXPECT_EQ(sizeAfter(base, waitingFor(4, 2)), 4U);
  base.witness.bytes[0] = 1;
  EXPECT_EQ(sizeAfter(base, waitingFor(4, 2)), 2U);
}

TEST(NextView, CountsVotersAmongTheReady) {
  View base = viewOf(5);
  base.voters = {idOf(3), idOf(4), idOf(5)};
  EXPECT_EQ(sizeAfter(base, waitingFor(5, 3)), 5U);
  EXPECT_EQ(sizeAfter(base, waitingFor(5, 4)), 4U);
}

TEST(NextView, CountsLearnersThatWerePromotedAmongTheReady) {
  View base = viewOf(5);
  base.voters = {idOf(4), idOf(5)};
  auto promises = waitingFor(5, 3);
  EXPECT_EQ(sizeAfter(base, promises), 5U);
  for (auto& [id, promise] : promises) promise.promotion = Promotion::kYes;
  EXPECT_EQ(sizeAfter(base, promises), 3U);
}

TEST(NextView, IsNotSmallerThanMinSizeForTheSakeOfAbsentMembers) {
  EXPECT_EQ(sizeAfter(viewOf(4), waitingFor(4, 3), 3), 3U);
  EXPECT_EQ(sizeAfter(viewOf(4), waitingFor(4, 3), 4), 4U);
}

TEST(NextView, KeepsAnAbsentMemberThatHoldsTheOnlyCopyOfAShard) {
  auto promises = waitingFor(4, 3);
  for (uint8_t i = 1; i <= 4; ++i) promises[idOf(i)].shard = i % 2;
  EXPECT_EQ(sizeAfter(viewOf(4), promises), 3U);
  promises[idOf(4)].shard = 7;
  EXPECT_EQ(sizeAfter(viewOf(4), promises), 4U);
}

TEST(NextView, KeepsWhoIsNotReadyWhereNobodyCallsItAbsent) {
  auto promises = waitingFor(3, 2);
  promises[idOf(1)].absent.clear();
  EXPECT_EQ(sizeAfter(viewOf(3), promises), 3U);
}

}  // namespace
}  // namespace torchft_ext
