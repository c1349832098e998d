#include "host/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "cpp/host/schedule_simulator.h"
#include "cpp/host/schedule_support.h"

namespace torchft_ext {
namespace {

constexpr size_t kHuge = std::numeric_limits<size_t>::max();
const int kWorlds[] = {1, 2, 3, 4, 5, 7, 8, 11, 16};
const size_t kCounts[] = {0, 1, 13, 700};  // items: none, one, odd, several chunks a slice
const size_t kCapacities[] = {0, 1000};
const ReduceKind kReductions[] = {ReduceKind::kSum, ReduceKind::kAvg, ReduceKind::kProduct,
                                  ReduceKind::kMin, ReduceKind::kMax, ReduceKind::kPreMulSum};

// Chunks of 64 bytes, so that little data makes many; each setting forces one family of algorithms.
const ScheduleTuning kDirect{64, 0, 1000};
const ScheduleTuning kRing{64, 0, 1};
const ScheduleTuning kFewRounds{64, kHuge, 8};
const ScheduleTuning kTunings[] = {kDirect, kRing, kFewRounds};

// The memory of all ranks: one vector of items for each rank and buffer.
template <typename T>
using Memory = std::vector<std::vector<std::vector<T>>>;

template <typename T>
std::vector<Buffer> buffersOf(std::vector<std::vector<T>>& memory) {
  std::vector<Buffer> buffers;
  for (auto& items : memory) buffers.push_back(bufferOf(items));
  return buffers;
}

// counts(rank, buffer) items each, with distinct small values.
template <typename T, typename Counts>
Memory<T> makeMemory(int size, int buffers, Counts counts, bool fill) {
  Memory<T> memory(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    for (int buffer = 0; buffer < buffers; ++buffer) {
      auto& items = memory[static_cast<size_t>(rank)].emplace_back(counts(rank, buffer));
      for (size_t i = 0; fill && i < items.size(); ++i) {
        items[i] = static_cast<T>(
            (static_cast<size_t>(rank) * 31 + static_cast<size_t>(buffer) * 7 + i) % 5 + 1);
      }
    }
  }
  return memory;
}

template <typename T>
void simulate(std::vector<Operation> operations, const ScheduleTuning& tuning, size_t capacity) {
  static uint32_t seed = 1;
  Simulator<T>(std::move(operations), tuning, capacity, ++seed).run();
}

// The reduction over all ranks of memory[rank][buffer], in rank order.
template <typename T>
std::vector<T> reduced(const Memory<T>& memory, size_t buffer, ReduceKind op) {
  std::vector<T> result = memory[0][buffer];
  for (size_t rank = 1; rank < memory.size(); ++rank) {
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = combine(result[i], memory[rank][buffer][i], op);
    }
  }
  if (op == ReduceKind::kAvg) {
    for (T& value : result) value = static_cast<T>(value / static_cast<T>(memory.size()));
  }
  if (op == ReduceKind::kPreMulSum) {  // whole numbers: exact in any order
    for (T& value : result) value = static_cast<T>(value * static_cast<T>(kFactor));
  }
  return result;
}

// Runs body(size, tuning, capacity) over all combinations, until one fails.
template <typename Body>
void forAllSettings(Body body) {
  for (const int size : kWorlds) {
    for (size_t tuning = 0; tuning < std::size(kTunings); ++tuning) {
      for (const size_t capacity : kCapacities) {
        SCOPED_TRACE("world " + std::to_string(size) + ", tuning " + std::to_string(tuning) +
                     ", capacity " + std::to_string(capacity));
        body(size, kTunings[tuning], capacity);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

template <typename T>
void checkAllreduce(int size, size_t count, ReduceKind op, const ScheduleTuning& tuning,
                    size_t capacity) {
  SCOPED_TRACE(std::to_string(count) + " items, " + toString(op));
  auto memory = makeMemory<T>(
      size, 1, [&](int, int) { return count; }, true);
  const std::vector<T> expected = reduced(memory, 0, op);
  std::vector<Operation> operations;
  for (auto& rank : memory) {
    operations.push_back(operationOf<T>(OpKind::kAllreduce, op));
    operations.back().outputs = buffersOf(rank);
  }
  simulate<T>(operations, tuning, capacity);
  for (auto& rank : memory) EXPECT_EQ(rank[0], expected);
}

TEST(Schedule, AllreduceGivesEveryRankTheExactResult) {
  forAllSettings([](int size, const ScheduleTuning& tuning, size_t capacity) {
    for (const size_t count : kCounts) {
      checkAllreduce<int64_t>(size, count, ReduceKind::kSum, tuning, capacity);
      checkAllreduce<uint8_t>(size, count, ReduceKind::kMax, tuning, capacity);
    }
    for (const ReduceKind op : kReductions) checkAllreduce<float>(size, 129, op, tuning, capacity);
  });
}

TEST(Schedule, AllreduceGivesEveryRankTheSameBits) {
  forAllSettings([](int size, const ScheduleTuning& tuning, size_t capacity) {
    for (const ReduceKind op : kReductions) {
      std::mt19937 random(7);
      std::uniform_real_distribution<float> values(-1, 1);
      auto memory = makeMemory<float>(
          size, 1, [](int, int) { return size_t{200}; }, false);
      for (size_t rank = 0; rank < memory.size(); ++rank) {
        for (float& value : memory[rank][0]) value = values(random);
        memory[rank][0][3] = rank % 2 == 0 ? 0.0F : -0.0F;
      }
      std::vector<Operation> operations;
      for (auto& rank : memory) {
        operations.push_back(operationOf<float>(OpKind::kAllreduce, op));
        operations.back().outputs = buffersOf(rank);
      }
      simulate<float>(operations, tuning, capacity);
      for (auto& rank : memory) {
        EXPECT_EQ(std::memcmp(rank[0].data(), memory[0][0].data(), 200 * sizeof(float)), 0);
      }
    }
  });
}

TEST(Schedule, BroadcastGivesEveryRankTheRootsBytes) {
  forAllSettings([](int size, const ScheduleTuning& tuning, size_t capacity) {
    for (const size_t count : kCounts) {
      for (const int root : {0, size / 2, size - 1}) {
        auto memory = makeMemory<int64_t>(
            size, 1, [&](int, int) { return count; }, true);
        const std::vector<int64_t> expected = memory[static_cast<size_t>(root)][0];
        std::vector<Operation> operations;
        for (auto& rank : memory) {
          operations.push_back(operationOf<int64_t>(OpKind::kBroadcast, ReduceKind::kSum, root));
          operations.back().outputs = buffersOf(rank);
        }
        simulate<int64_t>(operations, tuning, capacity);
        for (auto& rank : memory) EXPECT_EQ(rank[0], expected);
      }
    }
  });
}

size_t unevenCount(int a, int b = 0) {
  return static_cast<size_t>((a * 13 + b * 29) % 40) * (a % 3 == 1 ? 9 : 1);
}

void checkAllgather(int size, bool in_place, const ScheduleTuning& tuning, size_t capacity) {
  auto inputs = makeMemory<uint8_t>(
      size, 1, [](int rank, int) { return unevenCount(rank); }, true);
  auto outputs = makeMemory<uint8_t>(
      size, size, [](int, int from) { return unevenCount(from); }, false);
  std::vector<Operation> operations;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    operations.push_back(operationOf<uint8_t>(OpKind::kAllgather));
    operations.back().outputs = buffersOf(outputs[rank]);
    operations.back().inputs = buffersOf(inputs[rank]);
    if (in_place) {
      outputs[rank][rank] = inputs[rank][0];
      operations.back().inputs[0] = bufferOf(outputs[rank][rank]);
      operations.back().outputs[rank] = operations.back().inputs[0];
    }
  }
  simulate<uint8_t>(operations, tuning, capacity);
  for (auto& rank : outputs) {
    for (size_t from = 0; from < inputs.size(); ++from) EXPECT_EQ(rank[from], inputs[from][0]);
  }
}

TEST(Schedule, AllgatherPlacesUnevenParts) {
  forAllSettings([](int size, const ScheduleTuning& tuning, size_t capacity) {
    checkAllgather(size, false, tuning, capacity);
    checkAllgather(size, true, tuning, capacity);
  });
}

void checkReduceScatter(int size, ReduceKind op, bool in_place, const ScheduleTuning& tuning,
                        size_t capacity) {
  auto inputs = makeMemory<float>(
      size, size, [](int, int to) { return unevenCount(to); }, true);
  auto outputs = makeMemory<float>(
      size, 1, [](int rank, int) { return unevenCount(rank); }, false);
  const auto before = inputs;
  std::vector<Operation> operations;
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    operations.push_back(operationOf<float>(OpKind::kReduceScatter, op));
    operations.back().inputs = buffersOf(inputs[rank]);
    operations.back().outputs = {in_place ? bufferOf(inputs[rank][rank])
                                          : bufferOf(outputs[rank][0])};
  }
  simulate<float>(operations, tuning, capacity);
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    EXPECT_EQ(in_place ? inputs[rank][rank] : outputs[rank][0], reduced(before, rank, op));
    for (size_t to = 0; to < inputs.size(); ++to) {
      if (to != rank || !in_place) {
        EXPECT_EQ(inputs[rank][to], before[rank][to]) << "an input was written";
      }
    }
  }
}

TEST(Schedule, ReduceScatterReducesUnevenPartsAndKeepsItsInputs) {
  forAllSettings([](int size, const ScheduleTuning& tuning, size_t capacity) {
    for (const ReduceKind op : kReductions) checkReduceScatter(size, op, false, tuning, capacity);
    checkReduceScatter(size, ReduceKind::kAvg, true, tuning, capacity);
    checkReduceScatter(size, ReduceKind::kPreMulSum, true, tuning, capacity);
  });
}

void checkReduce(int size, int root, size_t count, ReduceKind op, bool in_place,
                 const ScheduleTuning& tuning, size_t capacity) {
  auto inputs = makeMemory<float>(
      size, 1, [&](int, int) { return count; }, true);
  const auto before = inputs;
  std::vector<float> output(count);
  std::vector<Operation> operations;
  for (auto& rank : inputs) {
    operations.push_back(operationOf<float>(OpKind::kReduce, op, root));
    operations.back().inputs = buffersOf(rank);
  }
  auto& at_root = operations[static_cast<size_t>(root)];
  at_root.outputs = {in_place ? at_root.inputs[0] : bufferOf(output)};
  simulate<float>(operations, tuning, capacity);
  auto& input_of_root = inputs[static_cast<size_t>(root)][0];
  EXPECT_EQ(in_place ? input_of_root : output, reduced(before, 0, op));
  if (in_place) input_of_root = before[static_cast<size_t>(root)][0];
  EXPECT_EQ(inputs, before) << "an input was written";
}

TEST(Schedule, ReduceGivesTheRootTheResultAndKeepsItsInputs) {
  forAllSettings([](int size, const ScheduleTuning& tuning, size_t capacity) {
    for (const size_t count : kCounts) {
      checkReduce(size, size / 2, count, ReduceKind::kSum, false, tuning, capacity);
      checkReduce(size, size - 1, count, ReduceKind::kSum, true, tuning, capacity);
    }
    for (const ReduceKind op : kReductions) checkReduce(size, 0, 150, op, true, tuning, capacity);
  });
}

TEST(Schedule, GatherCollectsUnevenPartsAtTheRoot) {
  forAllSettings([](int size, const ScheduleTuning& tuning, size_t capacity) {
    const auto root = static_cast<size_t>(size / 2);
    auto inputs = makeMemory<uint8_t>(
        size, 1, [](int rank, int) { return unevenCount(rank); }, true);
    auto outputs = makeMemory<uint8_t>(
        1, size, [](int, int from) { return unevenCount(from); }, false);
    std::vector<Operation> operations;
    for (auto& rank : inputs) {
      operations.push_back(operationOf<uint8_t>(OpKind::kGather, ReduceKind::kSum, size / 2));
      operations.back().inputs = buffersOf(rank);
    }
    operations[root].outputs = buffersOf(outputs[0]);
    simulate<uint8_t>(operations, tuning, capacity);
    for (size_t from = 0; from < inputs.size(); ++from)
      EXPECT_EQ(outputs[0][from], inputs[from][0]);
  });
}

TEST(Schedule, ScatterHandsOutUnevenParts) {
  forAllSettings([](int size, const ScheduleTuning& tuning, size_t capacity) {
    const auto root = static_cast<size_t>(size - 1);
    auto inputs = makeMemory<uint8_t>(
        1, size, [](int, int to) { return unevenCount(to); }, true);
    auto outputs = makeMemory<uint8_t>(
        size, 1, [](int rank, int) { return unevenCount(rank); }, false);
    std::vector<Operation> operations;
    for (auto& rank : outputs) {
      operations.push_back(operationOf<uint8_t>(OpKind::kScatter, ReduceKind::kSum, size - 1));
      operations.back().outputs = buffersOf(rank);
    }
    operations[root].inputs = buffersOf(inputs[0]);
    simulate<uint8_t>(operations, tuning, capacity);
    for (size_t to = 0; to < outputs.size(); ++to) EXPECT_EQ(outputs[to][0], inputs[0][to]);
  });
}

TEST(Schedule, AlltoallTransposesUnevenParts) {
  forAllSettings([](int size, const ScheduleTuning& tuning, size_t capacity) {
    auto inputs = makeMemory<int64_t>(
        size, size, [](int rank, int to) { return unevenCount(rank, to); }, true);
    auto outputs = makeMemory<int64_t>(
        size, size, [](int rank, int from) { return unevenCount(from, rank); }, false);
    std::vector<Operation> operations;
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      operations.push_back(operationOf<int64_t>(OpKind::kAlltoall));
      operations.back().inputs = buffersOf(inputs[rank]);
      operations.back().outputs = buffersOf(outputs[rank]);
    }
    simulate<int64_t>(operations, tuning, capacity);
    for (size_t to = 0; to < inputs.size(); ++to) {
      for (size_t from = 0; from < inputs.size(); ++from) {
        EXPECT_EQ(outputs[to][from], inputs[from][to]);
      }
    }
  });
}

TEST(Schedule, BarrierEndsOnEveryRank) {
  forAllSettings([](int size, const ScheduleTuning& tuning, size_t capacity) {
    std::vector<Operation> operations(static_cast<size_t>(size));
    simulate<uint8_t>(operations, tuning, capacity);
  });
}

// Follows "done before" backwards through all ranks: the last steps of a barrier must reach every
// rank's first send.
TEST(Schedule, BarrierEndsOnlyWhenAllRanksHaveEntered) {
  for (const int size : kWorlds) {
    const auto world = static_cast<size_t>(size);
    std::vector<Schedule> schedules;
    for (int rank = 0; rank < size; ++rank) {
      schedules.push_back(makeSchedule(Operation{}, rank, size, {}));
    }
    // heard[rank][step]: the ranks that must have entered when this step is done.
    std::vector<std::vector<std::vector<bool>>> heard(world);
    for (size_t rank = 0; rank < world; ++rank) {
      heard[rank].assign(schedules[rank].steps.size(), std::vector<bool>(world, false));
    }
    const auto merge = [](std::vector<bool>& into, const std::vector<bool>& from) {
      for (size_t i = 0; i < from.size(); ++i) into[i] = into[i] || from[i];
    };
    for (int pass = 0; pass < size; ++pass) {  // enough passes for any chain of frames
      for (size_t rank = 0; rank < world; ++rank) {
        const auto& steps = schedules[rank].steps;
        for (size_t i = 0; i < steps.size(); ++i) {
          heard[rank][i][rank] = true;
          for (const int before : steps[i].after) {
            if (before >= 0) merge(heard[rank][i], heard[rank][static_cast<size_t>(before)]);
          }
          if (steps[i].kind != Step::Kind::kRecv) continue;
          const auto& theirs = schedules[static_cast<size_t>(steps[i].peer)].steps;
          for (size_t j = 0; j < theirs.size(); ++j) {  // one frame for each pair in a barrier
            const bool matches =
                theirs[j].kind == Step::Kind::kSend && theirs[j].peer == static_cast<int>(rank);
            if (matches) merge(heard[rank][i], heard[static_cast<size_t>(steps[i].peer)][j]);
          }
        }
      }
    }
    for (size_t rank = 0; rank < world; ++rank) {
      std::vector<bool> all(world, size == 1);
      for (const auto& entered : heard[rank]) merge(all, entered);
      EXPECT_EQ(all, std::vector<bool>(world, true)) << "world " << size << ", rank " << rank;
    }
  }
}

TEST(Schedule, SlicesOfBigBuffersBeginOnCacheConnections) {
  std::vector<float> items(100'003);
  Operation operation = operationOf<float>(OpKind::kAllreduce);
  operation.outputs = {bufferOf(items)};
  const Schedule schedule = makeSchedule(operation, 1, 3, {});
  ASSERT_FALSE(schedule.steps.empty());
  for (const Step& step : schedule.steps) {
    EXPECT_EQ((step.data - operation.outputs[0].data) % 64, 0);
  }
}

TEST(Schedule, LongBuffersTravelInChunks) {
  std::vector<uint8_t> items(8 << 20);
  Operation operation = operationOf<uint8_t>(OpKind::kAllreduce);
  operation.outputs = {bufferOf(items)};
  const ScheduleTuning tuning;
  size_t sent = 0;
  for (const Step& step : makeSchedule(operation, 0, 2, tuning).steps) {
    EXPECT_LE(step.bytes, tuning.chunk_bytes);
    if (step.kind == Step::Kind::kSend) sent += step.bytes;
  }
  EXPECT_EQ(sent, items.size());  // one half to be reduced, the other one reduced
}

}  // namespace
}  // namespace torchft_ext
