// Every collective over shared memory, in worlds of one to eight ranks that take turns at random.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "cpp/host/shared_cases.h"
#include "cpp/host/shared_world.h"

namespace torchft_ext {
namespace {

using namespace shared_test;  // NOLINT(google-build-using-namespace)

constexpr size_t kSlot = 1024;  // small, so that few bytes make many rounds
// As those that are built in, with such slots.
const std::string kPlans =
    "allreduce any any 80 line\nallreduce any any 1K once\nallreduce any any any slices\n";

// Runs the operations on all ranks, each a few instructions at a time, in an order by chance. A
// rank that is done with one goes on to the next.
void runAll(SharedWorld& world, const std::vector<Case>& cases, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<World> worlds;
  std::vector<World> expected;
  for (const Case& one : cases) {
    auto [before, after] = makeWorld(one, world.size());
    worlds.push_back(std::move(before));
    expected.push_back(std::move(after));
  }
  struct Rank {
    size_t at = 0;
    bool begun = false;
    Operation operation;
  };
  std::vector<Rank> ranks(static_cast<size_t>(world.size()));
  size_t idle = 0;
  const size_t patience = 100000;
  while (idle < patience) {
    const int number = static_cast<int>(random() % ranks.size());
    Rank& rank = ranks[static_cast<size_t>(number)];
    if (std::all_of(ranks.begin(), ranks.end(),
                    [&](const Rank& r) { return r.at == cases.size(); }))
      break;
    if (rank.at == cases.size()) continue;
    SharedExecution& execution = world.execution(number);
    if (!rank.begun) {
      rank.operation = operationOf(cases[rank.at], worlds[rank.at][static_cast<size_t>(number)]);
      execution.begin(rank.operation);
      rank.begun = true;
    } else if (!execution.mayGoOn()) {
      ++idle;
      continue;
    }
    idle = 0;
    size_t budget = random() % 4 * 64;
    const SharedExecution::State state = execution.run(&budget);
    ASSERT_NE(state, SharedExecution::State::kMismatch) << execution.how();
    ASSERT_NE(state, SharedExecution::State::kNoMemory);
    if (state != SharedExecution::State::kDone) continue;
    rank.begun = false;
    ++rank.at;
  }
  ASSERT_LT(idle, patience) << "nobody goes on";
  for (size_t at = 0; at < cases.size(); ++at) {
    for (int rank = 0; rank < world.size(); ++rank) {
      const auto number = static_cast<size_t>(rank);
      ASSERT_EQ(worlds[at][number].outputs, expected[at][number].outputs)
          << nameOf(cases[at]) << ", rank " << rank << " of " << world.size();
      ASSERT_EQ(worlds[at][number].inputs, expected[at][number].inputs)
          << nameOf(cases[at]) << ": an input was written";
    }
  }
}

class SharedPrograms : public testing::TestWithParam<int> {};

TEST_P(SharedPrograms, GiveTheResultsOfEveryKindAtEverySize) {
  SharedWorld world(GetParam(), kSlot, kPlans);
  uint64_t seed = 1;
  for (const OpKind kind : kKinds) {
    // Items of 4 bytes: a line has 20, a slot 256.
    for (const size_t count : {0, 1, 2, 5, 19, 20, 21, 100, 255, 256, 257, 511, 513, 1500}) {
      for (const int root : {0, GetParam() - 1}) {
        runAll(world, {{kind, count, root}}, ++seed);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(SharedPrograms, MayFollowEachOtherInAnyOrder) {
  SharedWorld world(GetParam(), kSlot, kPlans);
  std::mt19937_64 random(GetParam());
  for (int series = 0; series < 60; ++series) {
    std::vector<Case> cases;
    for (int i = 0; i < 12; ++i) {
      Case one;
      one.kind = kKinds[random() % kKinds.size()];
      one.count = random() % 3 == 0 ? random() % 1200 : random() % 40;
      one.root = static_cast<int>(random() % static_cast<uint64_t>(GetParam()));
      const ReduceKind reductions[] = {ReduceKind::kSum, ReduceKind::kMax, ReduceKind::kAvg};
      one.reduce = reductions[random() % 3];
      cases.push_back(one);
    }
    runAll(world, cases, random());
    if (HasFatalFailure()) return;
  }
}

TEST_P(SharedPrograms, ARootThatReadsNothingRunsAheadAsFarAsTheLinesReach) {
  if (GetParam() == 1) return;
  SharedWorld world(GetParam(), kSlot, kPlans);
  runAll(world, std::vector<Case>(100, {OpKind::kBroadcast, 3, 0}), 5);
  runAll(world, std::vector<Case>(100, {OpKind::kGather, 300, 0}), 6);
}

INSTANTIATE_TEST_SUITE_P(Worlds, SharedPrograms, testing::Values(1, 2, 3, 4, 5, 8),
                         [](const auto& world) { return std::to_string(world.param); });

TEST(SharedProgram, AnotherOperationIsAMismatch) {
  SharedWorld world(2, kSlot, kPlans);
  Ints zero(4);
  Ints one(4);
  Operation sum;
  sum.kind = OpKind::kAllreduce;
  sum.dtype = DType::kInt32;
  sum.outputs = {{reinterpret_cast<uint8_t*>(zero.data()), 16}};
  Operation barrier;
  world.execution(0).begin(sum);
  world.execution(1).begin(barrier);
  size_t budget = 1 << 20;
  EXPECT_EQ(world.execution(0).run(&budget), SharedExecution::State::kWaits);
  EXPECT_EQ(world.execution(1).run(&budget), SharedExecution::State::kMismatch);
  EXPECT_EQ(world.execution(1).peer(), 0);
  EXPECT_NE(world.execution(1).how().find("it issued allreduce (sum) of int32"), std::string::npos)
      << world.execution(1).how();
}

// Both take themselves for the root, and neither awaits the other.
TEST(SharedProgram, AnotherRootIsFoundAtTheNextWait) {
  SharedWorld world(2, kSlot, kPlans);
  std::vector<Ints> data(2, Ints(4));
  std::vector<Operation> operations(2);
  size_t budget = 1 << 20;
  for (int rank = 0; rank < 2; ++rank) {
    Operation& broadcast = operations[static_cast<size_t>(rank)];
    broadcast.kind = OpKind::kBroadcast;
    broadcast.dtype = DType::kInt32;
    broadcast.root = rank;
    broadcast.outputs = {{reinterpret_cast<uint8_t*>(data[static_cast<size_t>(rank)].data()), 16}};
    world.execution(rank).begin(broadcast);
    EXPECT_EQ(world.execution(rank).run(&budget), SharedExecution::State::kDone);
  }
  Operation barrier;
  world.execution(0).begin(barrier);
  EXPECT_EQ(world.execution(0).run(&budget), SharedExecution::State::kWaits);
  world.execution(1).begin(barrier);
  EXPECT_EQ(world.execution(1).run(&budget), SharedExecution::State::kMismatch);
  EXPECT_NE(world.execution(1).how().find("it issued other operations"), std::string::npos)
      << world.execution(1).how();
}

}  // namespace
}  // namespace torchft_ext
