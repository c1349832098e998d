// Every collective over shared memory, in worlds of one to eight ranks that take turns at random.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpp/host/shared_world.h"

namespace torchft_ext {
namespace {

using shared_test::SharedWorld;
using Ints = std::vector<int32_t>;

constexpr size_t kSlot = 1024;  // small, so that few bytes make many rounds

// What one rank has in an operation: inputs and outputs as lists of buffers.
struct Side {
  std::vector<Ints> inputs;
  std::vector<Ints> outputs;
};
using World = std::vector<Side>;

int32_t item(int rank, size_t index, int salt = 0) {
  return static_cast<int32_t>((static_cast<size_t>(rank) + 1) * 1000003 + index * 7919 +
                              static_cast<size_t>(salt) * 104729) %
         100000;
}
Ints itemsOf(int rank, size_t count, int salt = 0) {
  Ints items(count);
  for (size_t i = 0; i < count; ++i) items[i] = item(rank, i, salt);
  return items;
}

struct Case {
  OpKind kind;
  size_t count;  // items of a buffer; of alltoall and allgather some more or less by rank
  int root = 0;
  ReduceKind reduce = ReduceKind::kSum;
};

size_t countOf(const Case& one, int from, int to) {
  if (one.kind == OpKind::kAlltoall) {
    return one.count * static_cast<size_t>((from * 3 + to * 5) % 4) / 2;
  }
  if (one.kind == OpKind::kAllgather) return one.count + static_cast<size_t>(from);
  return one.count;
}

// Before and after.
std::pair<World, World> makeWorld(const Case& one, int size) {
  World before(static_cast<size_t>(size));
  const auto side = [&](int rank) -> Side& { return before[static_cast<size_t>(rank)]; };
  for (int rank = 0; rank < size; ++rank) {
    const bool is_root = rank == one.root;
    Side& own = side(rank);
    switch (one.kind) {
      case OpKind::kAllreduce:
      case OpKind::kBroadcast:
        own.outputs = {itemsOf(rank, one.count)};
        break;
      case OpKind::kAllgather:
        own.inputs = {itemsOf(rank, countOf(one, rank, 0))};
        for (int from = 0; from < size; ++from) own.outputs.emplace_back(countOf(one, from, 0));
        break;
      case OpKind::kReduce:
        own.inputs = {itemsOf(rank, one.count)};
        if (is_root) own.outputs = {Ints(one.count)};
        break;
      case OpKind::kGather:
        own.inputs = {itemsOf(rank, one.count)};
        if (is_root) own.outputs.assign(static_cast<size_t>(size), Ints(one.count));
        break;
      case OpKind::kScatter:
        own.outputs = {Ints(one.count)};
        for (int to = 0; is_root && to < size; ++to) {
          own.inputs.push_back(itemsOf(rank, one.count, to));
        }
        break;
      case OpKind::kReduceScatter:
        for (int to = 0; to < size; ++to) own.inputs.push_back(itemsOf(rank, one.count, to));
        own.outputs = {Ints(one.count)};
        break;
      case OpKind::kAlltoall:
        for (int to = 0; to < size; ++to) {
          own.inputs.push_back(itemsOf(rank, countOf(one, rank, to), to));
          own.outputs.emplace_back(countOf(one, to, rank));
        }
        break;
      default:
        break;
    }
  }
  World after = before;
  const auto sumOf = [&](size_t index, int salt) {
    int32_t sum = one.reduce == ReduceKind::kMax ? INT32_MIN : 0;
    for (int rank = 0; rank < size; ++rank) {
      const int32_t value = item(rank, index, salt);
      sum = one.reduce == ReduceKind::kMax ? std::max(sum, value) : sum + value;
    }
    return one.reduce == ReduceKind::kAvg ? sum / size : sum;
  };
  for (int rank = 0; rank < size; ++rank) {
    Side& own = after[static_cast<size_t>(rank)];
    for (size_t at = 0; at < own.outputs.size(); ++at) {
      const int from = static_cast<int>(at);
      for (size_t i = 0; i < own.outputs[at].size(); ++i) {
        int32_t& value = own.outputs[at][i];
        if (one.kind == OpKind::kAllreduce || one.kind == OpKind::kReduce) value = sumOf(i, 0);
        if (one.kind == OpKind::kBroadcast) value = item(one.root, i);
        if (one.kind == OpKind::kAllgather || one.kind == OpKind::kGather) value = item(from, i);
        if (one.kind == OpKind::kScatter) value = item(one.root, i, rank);
        if (one.kind == OpKind::kReduceScatter) value = sumOf(i, rank);
        if (one.kind == OpKind::kAlltoall) value = item(from, i, rank);
      }
    }
  }
  return {std::move(before), std::move(after)};
}

std::vector<Buffer> buffersOf(std::vector<Ints>& lists) {
  std::vector<Buffer> buffers;
  buffers.reserve(lists.size());
  for (Ints& items : lists) {
    buffers.push_back({reinterpret_cast<uint8_t*>(items.data()), items.size() * sizeof(int32_t)});
  }
  return buffers;
}

Operation operationOf(const Case& one, Side& side) {
  Operation operation;
  operation.kind = one.kind;
  operation.dtype = DType::kInt32;
  operation.reduce = one.reduce;
  operation.root = one.root;
  operation.inputs = buffersOf(side.inputs);
  operation.outputs = buffersOf(side.outputs);
  return operation;
}

std::string nameOf(const Case& one) {
  return std::string(toString(one.kind)) + " of " + std::to_string(one.count) + ", root " +
         std::to_string(one.root) + ", " + toString(one.reduce);
}

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

const std::vector<OpKind> kKinds = {OpKind::kAllreduce,     OpKind::kBroadcast, OpKind::kAllgather,
                                    OpKind::kReduce,        OpKind::kGather,    OpKind::kScatter,
                                    OpKind::kReduceScatter, OpKind::kAlltoall,  OpKind::kBarrier};

class SharedPrograms : public testing::TestWithParam<int> {};

TEST_P(SharedPrograms, GiveTheResultsOfEveryKindAtEverySize) {
  SharedWorld world(GetParam(), kSlot);
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
  SharedWorld world(GetParam(), kSlot);
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
  SharedWorld world(GetParam(), kSlot);
  runAll(world, std::vector<Case>(100, {OpKind::kBroadcast, 3, 0}), 5);
  runAll(world, std::vector<Case>(100, {OpKind::kGather, 300, 0}), 6);
}

INSTANTIATE_TEST_SUITE_P(Worlds, SharedPrograms, testing::Values(1, 2, 3, 4, 5, 8),
                         [](const auto& world) { return std::to_string(world.param); });

TEST(SharedProgram, AnotherOperationIsAMismatch) {
  SharedWorld world(2, kSlot);
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
  SharedWorld world(2, kSlot);
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
