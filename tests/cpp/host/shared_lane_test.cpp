// The lane: who executes, and that somebody always does.
#include "host/shared_lane.h"

#include <gtest/gtest.h>

#include <future>
#include <string>
#include <thread>
#include <vector>

#include "cpp/host/lane_world.h"

namespace torchft_ext {
namespace {

using namespace shared_test;  // NOLINT(google-build-using-namespace)

class SharedLaneTest : public testing::TestWithParam<int> {};

TEST_P(SharedLaneTest, EveryRankWaitsForEachOperation) {
  LaneWorld world(GetParam());
  world.run([&](int rank) {
    for (int i = 0; i < 300; ++i) {
      const Issued issued = world.allreduce(rank, i + rank, i % 3 == 0 ? 20000 : 3, true);
      ASSERT_TRUE(issued.wait());
      ASSERT_TRUE(world.isSum(issued, i)) << "operation " << i;
    }
  });
}

TEST_P(SharedLaneTest, OperationsThatNobodyWaitsForGoOn) {
  LaneWorld world(GetParam());
  std::vector<std::vector<Issued>> all(static_cast<size_t>(world.size()));
  world.run([&](int rank) {
    for (int i = 0; i < 40; ++i)
      all[static_cast<size_t>(rank)].push_back(world.allreduce(rank, i + rank, 1 + 5000 * (i % 4)));
  });
  for (const auto& issued : all) {
    for (size_t i = 0; i < issued.size(); ++i) {
      ASSERT_TRUE(waitFor([&] { return issued[i].state->done(); })) << "operation " << i;
      EXPECT_EQ(issued[i].state->failure(), nullptr);
      EXPECT_TRUE(world.isSum(issued[i], static_cast<int32_t>(i)));
    }
  }
  for (int rank = 0; rank < world.size(); ++rank) EXPECT_TRUE(world.lane(rank).idle());
}

// One thread waits for the last, another one for the first.
TEST_P(SharedLaneTest, SeveralThreadsWait) {
  LaneWorld world(GetParam());
  world.run([&](int rank) {
    for (int round = 0; round < 30; ++round) {
      std::vector<Issued> issued;
      for (int i = 0; i < 6; ++i) issued.push_back(world.allreduce(rank, i + rank, 100));
      auto first = std::async(std::launch::async, [&] { return issued.front().wait(); });
      EXPECT_TRUE(issued.back().wait());
      EXPECT_TRUE(first.get());
      for (const Issued& one : issued) ASSERT_TRUE(one.wait());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, SharedLaneTest, testing::Values(2, 3, 4, 8));

TEST(SharedLane, AWaitEndsAtItsDeadlineAndTheOperationGoesOn) {
  LaneWorld world(2);
  const Issued early = world.allreduce(0, 1, 10, true);
  EXPECT_FALSE(early.state->wait(Deadline::after(milliseconds(120))));
  const Issued late = world.allreduce(1, 2, 10);
  EXPECT_TRUE(waitFor([&] { return early.state->done(); }));
  EXPECT_TRUE(late.wait());
  EXPECT_TRUE(world.isSum(early, 1));
}

TEST(SharedLane, AFailureReleasesWhoExecutes) {
  LaneWorld world(3);
  const Issued issued = world.allreduce(0, 1, 10, true);
  auto waiting = std::async(std::launch::async, [&] { return issued.wait(); });
  std::this_thread::sleep_for(milliseconds(20));
  Failure failure;
  failure.kind = FailureKind::kPeerLost;
  world.lifecycle(0).fail(failure);
  world.lane(0).wakeExecutor();
  EXPECT_TRUE(world.lane(0).awaitLeft(testDeadline()));
  for (auto& [state, operation] : world.lane(0).cancelAll())
    state->complete(world.lifecycle(0).failure());
  EXPECT_FALSE(waiting.get());
  ASSERT_NE(issued.state->failure(), nullptr);
  EXPECT_EQ(issued.state->failure()->kind, FailureKind::kPeerLost);
}

TEST(SharedLane, AfterItsEndOperationsFailAtOnce) {
  LaneWorld world(2);
  Failure failure;
  failure.kind = FailureKind::kAborted;
  world.lifecycle(0).fail(failure);
  EXPECT_TRUE(world.lane(0).cancelAll().empty());
  const Issued issued = world.allreduce(0, 1, 10);
  ASSERT_TRUE(issued.state->done());
  EXPECT_EQ(issued.state->failure()->kind, FailureKind::kAborted);
}

TEST(SharedLane, OtherSizesAreAMismatchThatNamesTheOther) {
  LaneWorld world(2);
  world.allreduce(0, 1, 10);
  world.allreduce(1, 1, 11);
  ASSERT_TRUE(waitFor([&] { return world.lifecycle(0).over() || world.lifecycle(1).over(); }));
  const int found = world.lifecycle(0).over() ? 0 : 1;
  const FailurePtr failure = world.lifecycle(found).failure();
  EXPECT_EQ(failure->kind, FailureKind::kMismatch);
  EXPECT_EQ(failure->cause.rank, 1 - found);
  EXPECT_EQ(failure->op, "allreduce");
}

// Also where the sizes differ by whole rounds.
TEST(SharedLane, AGatherOfMoreThanItsRootExpectsIsAMismatch) {
  LaneWorld world(2);
  world.gather(0, kLaneSlot, kLaneSlot);
  world.gather(1, 2 * kLaneSlot, 0);
  ASSERT_TRUE(waitFor([&] { return world.lifecycle(0).over(); }));
  const FailurePtr failure = world.lifecycle(0).failure();
  EXPECT_EQ(failure->kind, FailureKind::kMismatch);
  EXPECT_NE(failure->cause.how.find("it sent 131072 bytes"), std::string::npos)
      << failure->cause.how;
}

// What it has done is in its memory: only what comes later needs it.
TEST(SharedLane, ALeaverIsNeededForWhatItHasNotDone) {
  LaneWorld world(2);
  const Issued first = world.allreduce(0, 1, 10);
  const Issued theirs = world.allreduce(1, 2, 10);
  EXPECT_TRUE(theirs.wait());
  world.lane(0).peerLeft(1, 1);
  EXPECT_TRUE(first.wait());
  EXPECT_TRUE(waitFor([&] { return world.lane(0).idle(); }));
  EXPECT_FALSE(world.lane(0).needs(1));
  const int told = world.exchanged(0);
  world.allreduce(0, 1, 10);
  EXPECT_TRUE(world.lane(0).needs(1));
  EXPECT_GT(world.exchanged(0), told);
}

}  // namespace
}  // namespace torchft_ext
