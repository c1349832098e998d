#include "host/schedule_runner.h"

#include <gtest/gtest.h>

#include <random>

#include "cpp/host/runner_test.h"

namespace torchft_ext {
namespace {

TEST_F(RunnerTest, AllreducesOfAllSizesAreExact) {
  for (const int size : {1, 2, 3, 5}) {
    connect(size);
    for (const size_t count : {0UL, 1UL, 50UL, 1001UL, 100'003UL}) {
      std::vector<std::vector<float>> items(ranks.size());
      std::vector<std::shared_ptr<OpState>> states;
      for (int rank = 0; rank < size; ++rank) {
        items[static_cast<size_t>(rank)].assign(count, static_cast<float>(rank + 1));
        states.push_back(
            issue(rank, allreduceOf(items[static_cast<size_t>(rank)], ReduceKind::kAvg)));
      }
      expectSuccess(states);
      const float mean = static_cast<float>(size + 1) / 2.0F;
      for (const auto& result : items) EXPECT_EQ(result, std::vector<float>(count, mean));
    }
    TearDown();
    ranks.clear();
  }
}

TEST_F(RunnerTest, SurvivesFullSocketsInBothDirections) {
  connect(3, {64 * 1024, 1024, 8}, 8 * 1024);
  std::vector<std::vector<float>> items(3, std::vector<float>(1 << 19, 2.0F));
  std::vector<std::shared_ptr<OpState>> states;
  for (int rank = 0; rank < 3; ++rank)
    states.push_back(issue(rank, allreduceOf(items[static_cast<size_t>(rank)])));
  expectSuccess(states);
  for (const auto& result : items) EXPECT_EQ(result, std::vector<float>(1 << 19, 6.0F));
}

TEST_F(RunnerTest, OperationsIssuedFarAheadOfAPeerRunInOrder) {
  connect(2);
  constexpr int kOps = 20;
  std::vector<std::vector<float>> first(kOps), second(kOps);
  std::vector<std::shared_ptr<OpState>> states;
  for (size_t i = 0; i < kOps; ++i) {
    first[i].assign(5000, static_cast<float>(i));
    states.push_back(issue(0, i % 2 == 0 ? allreduceOf(first[i]) : broadcastOf(first[i], 0)));
  }
  test.settle();
  EXPECT_FALSE(states[0]->done());
  for (size_t i = 0; i < kOps; ++i) {
    second[i].assign(5000, 1000.0F);
    states.push_back(issue(1, i % 2 == 0 ? allreduceOf(second[i]) : broadcastOf(second[i], 0)));
  }
  expectSuccess(states);
  for (size_t i = 0; i < kOps; ++i) {
    const float expected = i % 2 == 0 ? static_cast<float>(i) + 1000.0F : static_cast<float>(i);
    EXPECT_EQ(first[i], std::vector<float>(5000, expected));
    EXPECT_EQ(second[i], first[i]);
  }
}

// What the stress test issues: the same on all ranks, drawn from one seed.
struct Drawn {
  OpKind kind;
  size_t count;
  int root;
};

Drawn draw(std::mt19937& random, int size) {
  const OpKind kinds[] = {OpKind::kAllreduce,     OpKind::kBroadcast, OpKind::kAllgather,
                          OpKind::kReduceScatter, OpKind::kReduce,    OpKind::kGather,
                          OpKind::kScatter,       OpKind::kAlltoall,  OpKind::kBarrier};
  const size_t counts[] = {0, 1, 30, 700, 9000};
  return {kinds[random() % std::size(kinds)], counts[random() % std::size(counts)],
          static_cast<int>(random() % static_cast<unsigned>(size))};
}

// One rank's buffers for a drawn operation; every item of every input is 1.
struct Buffers {
  std::vector<std::vector<float>> inputs, outputs;

  Operation operationFor(const Drawn& drawn, int rank, int size) {
    const auto world = static_cast<size_t>(size);
    const bool is_root = rank == drawn.root;
    const bool many_inputs = drawn.kind == OpKind::kReduceScatter ||
                             drawn.kind == OpKind::kAlltoall || drawn.kind == OpKind::kScatter;
    const bool many_outputs = drawn.kind == OpKind::kAllgather || drawn.kind == OpKind::kAlltoall ||
                              drawn.kind == OpKind::kGather;
    const bool in_place = drawn.kind == OpKind::kAllreduce || drawn.kind == OpKind::kBroadcast;
    const bool no_input =
        in_place || drawn.kind == OpKind::kBarrier || (drawn.kind == OpKind::kScatter && !is_root);
    const bool no_output =
        drawn.kind == OpKind::kBarrier ||
        ((drawn.kind == OpKind::kReduce || drawn.kind == OpKind::kGather) && !is_root);
    const std::vector<float> ones(drawn.count, 1.0F);
    if (!no_input) inputs.assign(many_inputs ? world : 1, ones);
    if (!no_output)
      outputs.assign(many_outputs ? world : 1, std::vector<float>(drawn.count, -1.0F));
    if (in_place) outputs = {ones};
    Operation operation;
    operation.kind = drawn.kind;
    operation.dtype = DType::kFloat;
    operation.root = drawn.root;
    for (auto& input : inputs) operation.inputs.push_back(bufferOf(input));
    for (auto& output : outputs) operation.outputs.push_back(bufferOf(output));
    return operation;
  }

  void check(const Drawn& drawn, int size) const {
    const bool sums = drawn.kind == OpKind::kAllreduce || drawn.kind == OpKind::kReduce ||
                      drawn.kind == OpKind::kReduceScatter;
    const std::vector<float> expected(drawn.count, sums ? static_cast<float>(size) : 1.0F);
    for (const auto& output : outputs) EXPECT_EQ(output, expected) << toString(drawn.kind);
  }
};

TEST_F(RunnerTest, LongSequencesOfAllKindsWithRanksOutOfStepAreExact) {
  for (const int size : {2, 4, 5}) {  // the last is a ring here
    connect(size);
    constexpr size_t kOps = 120;
    std::mt19937 random(11);
    std::vector<Drawn> drawn;
    for (size_t i = 0; i < kOps; ++i) drawn.push_back(draw(random, size));
    std::vector<std::vector<Buffers>> buffers(ranks.size(), std::vector<Buffers>(kOps));
    std::vector<size_t> issued(ranks.size());
    std::vector<std::shared_ptr<OpState>> states;
    for (size_t left = kOps * ranks.size(); left > 0; --left) {
      size_t rank = random() % ranks.size();
      while (issued[rank] == kOps) rank = (rank + 1) % ranks.size();
      const size_t i = issued[rank]++;
      states.push_back(issue(static_cast<int>(rank), buffers[rank][i].operationFor(
                                                         drawn[i], static_cast<int>(rank), size)));
    }
    expectSuccess(states);
    for (const auto& of_rank : buffers) {
      for (size_t i = 0; i < kOps; ++i) of_rank[i].check(drawn[i], size);
    }
    TearDown();
    ranks.clear();
  }
}

TEST_F(RunnerTest, ALongLocalCopyLetsTheLoopTurn) {
  connect(1);
  std::vector<uint8_t> from = patternOf(20 << 20);
  std::vector<uint8_t> to(from.size());
  Operation operation;
  operation.kind = OpKind::kAllgather;
  operation.inputs = {bufferOf(from)};
  operation.outputs = {bufferOf(to)};
  auto state = stateOf(0, operation.kind);
  bool turned_before_the_end = false;
  test.on([&] {
    at(0).runner->add(state, std::move(operation));
    test.loop().post([&] { turned_before_the_end = !state->done(); });
  });
  expectSuccess({state});
  EXPECT_EQ(to, from);
  test.on([&] { EXPECT_TRUE(turned_before_the_end); });
}

TEST_F(RunnerTest, TellsOfGoodbyesAndEnds) {
  connect(2);
  test.on([&] {
    FrameHeader goodbye;
    goodbye.type = FrameType::kGoodbye;
    at(1).connections[0]->sendText(goodbye, {});
    at(1).connections[0]->closeAfterTexts(kTestPatience);
  });
  EXPECT_TRUE(test.eventually(
      [&] { return at(0).left == std::vector<int>{1} && at(0).broken.size() == 1; }));
  test.on([&] { EXPECT_EQ(at(0).broken[0], std::make_pair(1, true)); });
}

TEST_F(RunnerTest, AFrameThatDoesNotBelongHereBreaksTheConnection) {
  connect(2);
  test.on([&] {
    FrameHeader beat;
    beat.type = FrameType::kBeat;
    at(1).connections[0]->sendText(beat, {});
  });
  EXPECT_TRUE(test.eventually([&] { return at(0).broken.size() == 1; }));
  test.on([&] { EXPECT_FALSE(at(0).broken[0].second); });
}

Operation allgatherOf(std::vector<float>& input, std::vector<std::vector<float>>& outputs) {
  Operation operation;
  operation.kind = OpKind::kAllgather;
  operation.dtype = DType::kFloat;
  operation.inputs = {bufferOf(input)};
  for (auto& output : outputs) operation.outputs.push_back(bufferOf(output));
  return operation;
}

TEST_F(RunnerTest, CancelReturnsWhatIsPendingAndTouchesNoBufferAfterwards) {
  connect(2, kSmallChunks, 16 * 1024);
  constexpr size_t kCount =
      1 << 20;  // far more than the sockets hold: one frame is under way both ways
  std::vector<float> input(kCount, 1.0F), queued(10, 1.0F), their_input(kCount, 2.0F);
  std::vector<std::vector<float>> outputs(2, std::vector<float>(kCount)), theirs(outputs);
  const auto first = issue(0, allgatherOf(input, outputs));
  const auto second = issue(0, allreduceOf(queued));
  const auto third = issue(1, allgatherOf(their_input, theirs));
  // Looked at in every turn of the loop: the transfer takes many.
  std::vector<float> kept;
  std::function<void()> cancel_in_the_middle = [&] {
    if (outputs[1][0] != 2.0F) {
      test.loop().post(cancel_in_the_middle);
      return;
    }
    const auto pending = at(0).runner->cancelAll();
    ASSERT_EQ(pending.size(), 2U);
    EXPECT_EQ(pending[0].first, first);
    EXPECT_EQ(pending[1].first, second);
    EXPECT_TRUE(at(0).runner->idle());
    kept = outputs[1];
  };
  test.on(cancel_in_the_middle);
  EXPECT_TRUE(test.eventually([&] { return !at(1).broken.empty(); }))
      << "the connection was not cut";
  test.on([&] {
    EXPECT_EQ(outputs[1], kept);
    EXPECT_FALSE(first->done() || second->done() || third->done());
  });
}

TEST_F(RunnerTest, FramesThatArriveAfterCancelAreNotPlaced) {
  connect(2);
  std::vector<float> items(10, 1.0F), theirs(10, 5.0F);
  const auto mine = issue(0, allreduceOf(items));
  test.on([&] { EXPECT_EQ(at(0).runner->cancelAll().size(), 1U); });
  issue(1, allreduceOf(theirs));
  test.settle();
  test.on([&] { EXPECT_EQ(items, std::vector<float>(10, 1.0F)); });
  EXPECT_FALSE(mine->done());
}

TEST_F(RunnerTest, NeedsThePeersWhoseBytesAreMissing) {
  connect(3);
  std::vector<float> items(10, 1.0F), more(10, 1.0F);
  issue(2, broadcastOf(items, 1));
  test.on([&] {
    EXPECT_TRUE(at(2).runner->needs(1));
    EXPECT_FALSE(at(2).runner->needs(0));
    EXPECT_FALSE(at(1).runner->needs(0));
  });
  issue(2, broadcastOf(more, 0));
  test.on([&] {
    EXPECT_TRUE(at(2).runner->needs(0)) << "the queued operation needs it";
    EXPECT_FALSE(at(2).runner->idle());
  });
}

}  // namespace
}  // namespace torchft_ext
