// The lane: who executes, and that somebody always does.
#include "host/shared_lane.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cpp/host/shared_world.h"
#include "cpp/support/wait_for.h"
#include "net/event_loop.h"

namespace torchft_ext {
namespace {

constexpr size_t kSlot = size_t{64} << 10;

// An allreduce of so many int32, of which each rank gives its own values.
struct Issued {
  std::shared_ptr<OpState> state;
  std::shared_ptr<std::vector<int32_t>> data;

  bool wait() const { return state->wait(testDeadline()) && state->failure() == nullptr; }
};

class LaneWorld {
 public:
  explicit LaneWorld(int size) {
    const auto memories = shared_test::memoriesOf(size, kSlot);
    for (int rank = 0; rank < size; ++rank) {
      loops_.push_back(std::make_unique<EventLoop>("test-" + std::to_string(rank)));
      lifecycles_.push_back(
          std::make_shared<Lifecycle>(GenerationIdentity{"test", 0, rank, size, InJob::kNo}));
      lifecycles_.back()->activate();
    }
    for (int rank = 0; rank < size; ++rank) makeLane(memories[at(rank)], rank, size);
  }
  ~LaneWorld() {
    for (auto& loop : loops_) loop->stop(testDeadline());
  }

  int size() const { return static_cast<int>(lanes_.size()); }
  SharedLane& lane(int rank) { return *lanes_[at(rank)]; }
  Lifecycle& lifecycle(int rank) { return *lifecycles_[at(rank)]; }
  int exchanged(int rank) const { return exchanged_[at(rank)]->load(); }

  Issued allreduce(int rank, int32_t value, size_t items, bool waited = false) {
    Issued issued;
    issued.data = std::make_shared<std::vector<int32_t>>(items);
    std::iota(issued.data->begin(), issued.data->end(), value);
    issued.state = std::make_shared<OpState>(lifecycles_[at(rank)], OpKind::kAllreduce, 1,
                                             std::chrono::seconds(100));
    Operation operation;
    operation.kind = OpKind::kAllreduce;
    operation.dtype = DType::kInt32;
    operation.waited = waited;
    operation.outputs = {
        {reinterpret_cast<uint8_t*>(issued.data->data()), items * sizeof(int32_t)}};
    operation.keep_alive = issued.data;
    lane(rank).add(issued.state, std::move(operation));
    return issued;
  }

  // To rank 0, which expects so many bytes of each.
  Issued gather(int rank, size_t given, size_t expected) {
    Issued issued;
    const auto ranks = static_cast<size_t>(size());
    issued.data = std::make_shared<std::vector<int32_t>>((given + expected * ranks) / 4 + 1);
    auto* bytes = reinterpret_cast<uint8_t*>(issued.data->data());
    issued.state = std::make_shared<OpState>(lifecycles_[at(rank)], OpKind::kGather, 1,
                                             std::chrono::seconds(100));
    Operation operation;
    operation.kind = OpKind::kGather;
    operation.inputs = {{bytes, given}};
    for (size_t i = 0; rank == 0 && i < ranks; ++i)
      operation.outputs.push_back({bytes + given + i * expected, expected});
    operation.keep_alive = issued.data;
    lane(rank).add(issued.state, std::move(operation));
    return issued;
  }

  // What an allreduce gives of which rank r gave first + r.
  bool isSum(const Issued& issued, int32_t first) const {
    const int32_t ranks = size();
    for (size_t i = 0; i < issued.data->size(); ++i) {
      const auto place = static_cast<int32_t>(i);
      if ((*issued.data)[i] != ranks * (first + place) + ranks * (ranks - 1) / 2) return false;
    }
    return true;
  }

  // Each rank's thread runs it.
  void run(const std::function<void(int rank)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }

  void makeLane(std::shared_ptr<SharedMemory> memory, int rank, int size) {
    SharedLane::Callbacks callbacks;
    exchanged_.push_back(std::make_unique<std::atomic<int>>(0));
    callbacks.exchanged = [count = exchanged_.back().get()] { ++*count; };
    callbacks.post = [this, rank] { return advanceLater(rank); };
    callbacks.nudge = [this](int peer) { advanceLater(peer); };
    lanes_.push_back(
        std::make_shared<SharedLane>(std::move(memory), rank, size, lifecycles_[at(rank)],
                                     std::make_shared<Traffic>(), std::move(callbacks)));
  }
  bool advanceLater(int rank) {
    return loops_[at(rank)]->post([this, rank] { lane(rank).advance(); });
  }

  std::vector<std::unique_ptr<EventLoop>> loops_;
  std::vector<std::shared_ptr<Lifecycle>> lifecycles_;
  std::vector<std::unique_ptr<std::atomic<int>>> exchanged_;
  std::vector<std::shared_ptr<SharedLane>> lanes_;
};

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
  world.gather(0, kSlot, kSlot);
  world.gather(1, 2 * kSlot, 0);
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
