#include "host/schedule_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "connection_support.h"
#include "host/turn.h"

namespace torchft_ext {
namespace {

// Small chunks, so that every collective is many frames.
constexpr ScheduleTuning kSmallChunks{4096, 256, 4};

// The runners of all ranks of a generation, on one loop, with real connections between them.
class RunnerTest : public ::testing::Test {
 protected:
  struct Rank {
    std::vector<std::shared_ptr<Connection>> connections;
    std::unique_ptr<ScheduleRunner> runner;
    std::vector<Failure> failures;
    std::vector<int> left;
    std::vector<std::pair<int, bool>> broken;  // peer, clean
  };

  void connect(int size, const ScheduleTuning& tuning = kSmallChunks, int buffer_bytes = 0) {
    ranks.resize(static_cast<size_t>(size));
    for (Rank& rank : ranks) rank.connections.resize(ranks.size());
    for (size_t a = 0; a < ranks.size(); ++a) {
      for (size_t b = a + 1; b < ranks.size(); ++b) {
        SocketPair pair = tcpPair(buffer_bytes);
        test.on([&] {
          ranks[a].connections[b] =
              makeStreamConnection(test.loop(), std::move(pair.first), std::make_shared<Traffic>());
          ranks[b].connections[a] = makeStreamConnection(test.loop(), std::move(pair.second),
                                                         std::make_shared<Traffic>());
        });
      }
    }
    test.on([&] {
      for (size_t rank = 0; rank < ranks.size(); ++rank) makeRunner(static_cast<int>(rank), tuning);
    });
  }

  void makeRunner(int index, const ScheduleTuning& tuning) {
    Rank& rank = at(index);
    std::vector<Connection*> connections;
    for (const auto& connection : rank.connections) connections.push_back(connection.get());
    ScheduleRunner::Callbacks callbacks;
    callbacks.failed = [&rank](Failure failure) { rank.failures.push_back(std::move(failure)); };
    callbacks.broken = [&rank](int peer, const std::string&, bool clean) {
      rank.broken.emplace_back(peer, clean);
    };
    callbacks.left = [&rank](int peer, const FrameHeader&) { rank.left.push_back(peer); };
    rank.runner = std::make_unique<ScheduleRunner>(
        test.loop(), index, static_cast<int>(ranks.size()), connections, tuning, callbacks);
  }

  void TearDown() override {
    test.on([&] {
      for (Rank& rank : ranks) {
        if (rank.runner) rank.runner->cancelAll();
      }
      for (Rank& rank : ranks) {
        rank.connections.clear();
        rank.runner.reset();
      }
    });
  }

  Rank& at(int rank) { return ranks[static_cast<size_t>(rank)]; }

  std::shared_ptr<OpState> stateOf(int rank, OpKind kind) {
    GenerationIdentity identity{"dp0", 1, rank, static_cast<int>(ranks.size())};
    return std::make_shared<OpState>(std::make_shared<Lifecycle>(identity), kind, 42,
                                     kTestPatience);
  }
  std::shared_ptr<OpState> issue(int rank, Operation operation) {
    auto state = stateOf(rank, operation.kind);
    test.on([&] { at(rank).runner->add(state, std::move(operation)); });
    return state;
  }
  void expectSuccess(const std::vector<std::shared_ptr<OpState>>& states) {
    for (const auto& state : states) {
      ASSERT_TRUE(state->wait(testDeadline()));
      EXPECT_EQ(state->failure(), nullptr);
    }
  }
  // The one failure of a rank, once it has it.
  Failure failureOf(int rank) {
    EXPECT_TRUE(test.eventually([&] { return at(rank).failures.size() == 1; }));
    Failure failure;
    test.on([&] {
      if (!at(rank).failures.empty()) failure = at(rank).failures[0];
    });
    return failure;
  }

  TestLoop test;
  std::vector<Rank> ranks;
};

template <typename T>
Buffer bufferOf(std::vector<T>& items) {
  return {reinterpret_cast<uint8_t*>(items.data()), items.size() * sizeof(T)};
}

Operation allreduceOf(std::vector<float>& items, ReduceKind op = ReduceKind::kSum) {
  Operation operation;
  operation.kind = OpKind::kAllreduce;
  operation.dtype = DType::kFloat;
  operation.reduce = op;
  operation.outputs = {bufferOf(items)};
  return operation;
}

Operation broadcastOf(std::vector<float>& items, int root) {
  Operation operation = allreduceOf(items);
  operation.kind = OpKind::kBroadcast;
  operation.root = root;
  return operation;
}

// A sum of floats that lie apart: every other one of `apart`, by way of `close`.
Operation allreduceApart(std::vector<float>& apart, std::vector<float>& close) {
  Operation operation = allreduceOf(close);
  const StridedMemory memory{
      bufferOf(apart).data, sizeof(float), {close.size()}, {2 * sizeof(float)}};
  operation.loads.push_back(StridedCopy::load(memory, bufferOf(close).data));
  operation.stores.push_back(StridedCopy::store(bufferOf(close).data, memory));
  return operation;
}

// An operation of two exchanges, the second as long as the sum of what the first has brought.
class TwoExchanges : public Exchanges {
 public:
  TwoExchanges(int rank, size_t length, size_t size)
      : own_(1, static_cast<float>(length)), lengths_(size, std::vector<float>(1, -1.0F)) {
    rank_ = static_cast<size_t>(rank);
  }
  Operation operation() {
    Operation operation = allreduceOf(own_);
    operation.kind = OpKind::kSparseAllreduce;
    operation.inputs = {bufferOf(own_)};
    operation.outputs.clear();
    for (auto& length : lengths_) operation.outputs.push_back(bufferOf(length));
    return operation;
  }
  void begin() override { ++begun; }
  Next next(Operation& operation) override {
    if (!all_.empty()) return {again_-- > 0 ? Next::Kind::kLater : Next::Kind::kDone, -1, {}};
    if (lengths_.back()[0] > 1000) return {Next::Kind::kMismatch, 1, "it is too long"};
    own_.assign(static_cast<size_t>(lengths_[rank_][0]), 1.0F);
    for (const auto& length : lengths_) all_.emplace_back(static_cast<size_t>(length[0]), -1.0F);
    operation.inputs = {bufferOf(own_)};
    operation.outputs.clear();
    for (auto& part : all_) operation.outputs.push_back(bufferOf(part));
    return {Next::Kind::kExchange, -1, {}};
  }
  const std::vector<std::vector<float>>& all() const { return all_; }
  int begun = 0;

 private:
  size_t rank_;
  std::vector<float> own_;
  std::vector<std::vector<float>> lengths_, all_;
  int again_ = 3;
};

std::vector<std::shared_ptr<TwoExchanges>> exchangesOf(const std::vector<size_t>& lengths) {
  std::vector<std::shared_ptr<TwoExchanges>> exchanges;
  for (size_t rank = 0; rank < lengths.size(); ++rank)
    exchanges.push_back(
        std::make_shared<TwoExchanges>(static_cast<int>(rank), lengths[rank], lengths.size()));
  return exchanges;
}

Operation operationWith(const std::shared_ptr<TwoExchanges>& exchanges) {
  Operation operation = exchanges->operation();
  operation.exchanges = exchanges;
  return operation;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

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

TEST_F(RunnerTest, ADifferentOperationIsAMismatchThatNamesBoth) {
  connect(2);
  std::vector<float> first(10), second(10);
  const auto mine = issue(0, allreduceOf(first));
  issue(1, broadcastOf(second, 1));
  const Failure failure = failureOf(0);
  EXPECT_EQ(failure.kind, FailureKind::kMismatch);
  EXPECT_EQ(failure.cause.rank, 1);
  EXPECT_EQ(failure.op, "allreduce");
  EXPECT_EQ(failure.seq, 42);
  EXPECT_TRUE(contains(failure.cause.how, "broadcast of float32 with root 1")) << failure.cause.how;
  EXPECT_TRUE(contains(failure.cause.how, "rank 0 issued allreduce (sum) of float32"))
      << failure.cause.how;
  EXPECT_FALSE(mine->done());
}

TEST_F(RunnerTest, ADifferentSizeIsAMismatch) {
  connect(2);
  std::vector<float> first(10, 1.0F), second(11, 1.0F);
  const auto one = issue(0, allreduceOf(first));
  const auto other = issue(1, allreduceOf(second));
  EXPECT_TRUE(contains(failureOf(0).cause.how, "other sizes"));
  EXPECT_EQ(failureOf(1).kind, FailureKind::kMismatch);
  EXPECT_FALSE(one->done() || other->done());
}

TEST_F(RunnerTest, ADifferentReductionIsAMismatch) {
  connect(2);
  std::vector<float> first(10), second(10);
  issue(0, allreduceOf(first, ReduceKind::kMax));
  issue(1, allreduceOf(second, ReduceKind::kMin));
  EXPECT_TRUE(contains(failureOf(0).cause.how, "allreduce (min)"));
  EXPECT_TRUE(contains(failureOf(1).cause.how, "allreduce (max)"));
}

Operation alltoallOf(std::vector<std::vector<float>>& inputs,
                     std::vector<std::vector<float>>& outputs) {
  Operation operation;
  operation.kind = OpKind::kAlltoall;
  operation.dtype = DType::kFloat;
  for (auto& input : inputs) operation.inputs.push_back(bufferOf(input));
  for (auto& output : outputs) operation.outputs.push_back(bufferOf(output));
  return operation;
}

TEST_F(RunnerTest, AFrameOfAnotherLengthIsAMismatch) {
  connect(2);
  std::vector<std::vector<float>> in0{{1}, {2, 3}}, out0{{0}, {0}}, in1{{4}, {5}},
      out1{{0, 0, 0}, {0}};
  issue(0, alltoallOf(in0, out0));
  issue(1, alltoallOf(in1, out1));
  const Failure failure = failureOf(1);
  EXPECT_EQ(failure.kind, FailureKind::kMismatch);
  EXPECT_TRUE(contains(failure.cause.how, "8 bytes")) << failure.cause.how;
  EXPECT_TRUE(contains(failure.cause.how, "expects 12 bytes")) << failure.cause.how;
  test.on([&] { EXPECT_EQ(out1[0], (std::vector<float>{0, 0, 0})); });
}

TEST_F(RunnerTest, AFrameNobodyExpectsIsAMismatch) {
  connect(2);
  std::vector<std::vector<float>> in0{{1}, {2}}, out0{{0}, {0}}, in1{{4}, {5}}, out1{{}, {0}};
  issue(0, alltoallOf(in0, out0));
  issue(1, alltoallOf(in1, out1));
  EXPECT_EQ(failureOf(1).kind, FailureKind::kMismatch);
}

TEST_F(RunnerTest, APeerThatWentOnWithoutSendingIsAMismatch) {
  connect(2);
  std::vector<std::vector<float>> in0{{1}, {}}, out0{{0}, {}}, in1{{}, {5}}, out1{{0}, {0}};
  std::vector<float> first(10), second(10);
  issue(1, alltoallOf(in1, out1));
  issue(0, alltoallOf(in0, out0));
  issue(0, allreduceOf(first));
  const Failure failure = failureOf(1);
  EXPECT_EQ(failure.kind, FailureKind::kMismatch);
  EXPECT_EQ(failure.cause.rank, 0);
  EXPECT_TRUE(contains(failure.cause.how, "went on to allreduce")) << failure.cause.how;
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

// ---- memory with strides

TEST_F(RunnerTest, ContributionsAreLoadedWhenTheirTurnHasCome) {
  constexpr int kWorld = 3;
  constexpr size_t kItems = 3000;
  connect(kWorld);
  std::vector<std::vector<float>> apart(kWorld, std::vector<float>(2 * kItems, 1.0F));
  std::vector<std::vector<float>> first(kWorld, std::vector<float>(kItems, -1.0F));
  std::vector<std::vector<float>> second = first;
  std::vector<std::shared_ptr<OpState>> states;
  for (int rank = 0; rank < kWorld; ++rank) {
    const auto i = static_cast<size_t>(rank);
    // Both are issued before the others have come to the first.
    states.push_back(issue(rank, allreduceApart(apart[i], first[i])));
    states.push_back(issue(rank, allreduceApart(apart[i], second[i])));
  }
  expectSuccess(states);
  for (const auto& each : apart) {
    for (size_t i = 0; i < each.size(); ++i)
      ASSERT_EQ(each[i], i % 2 == 0 ? 9.0F : 1.0F) << "item " << i;
  }
}

TEST_F(RunnerTest, LongLoadsAndStoresLetTheLoopGoOn) {
  connect(1);
  const size_t items = 2 * kLocalBytesPerTurn / sizeof(float) + 1;
  std::vector<float> apart(2 * items, 3.0F);
  std::vector<float> close(items, 0.0F);
  const auto state = stateOf(0, OpKind::kAllreduce);
  test.on([&] {
    at(0).runner->add(state, allreduceApart(apart, close));
    EXPECT_EQ(std::count(close.begin(), close.end(), 3.0F),
              static_cast<std::ptrdiff_t>(kLocalBytesPerTurn / sizeof(float)));
    EXPECT_FALSE(at(0).runner->idle());
  });
  expectSuccess({state});
}

TEST_F(RunnerTest, NothingIsStoredOnceItIsCancelled) {
  connect(1);
  const size_t items = 2 * kLocalBytesPerTurn / sizeof(float) + 1;
  std::vector<float> apart(2 * items, 3.0F);
  std::vector<float> close(items, 5.0F);
  Operation operation = allreduceApart(apart, close);
  operation.loads.clear();
  const auto stored = [&] { return std::count(apart.begin(), apart.end(), 5.0F); };
  const auto a_turn = static_cast<std::ptrdiff_t>(kLocalBytesPerTurn / sizeof(float));
  const auto state = stateOf(0, OpKind::kAllreduce);
  test.on([&] {
    at(0).runner->add(state, std::move(operation));
    EXPECT_EQ(stored(), a_turn);
    const auto cancelled = at(0).runner->cancelAll();
    ASSERT_EQ(cancelled.size(), 1U);
    EXPECT_EQ(cancelled[0].first, state);
  });
  test.on([&] { EXPECT_EQ(stored(), a_turn); });  // behind what the runner had posted
  EXPECT_FALSE(state->done());
}

TEST_F(RunnerTest, OperationOfSeveralExchangesKeepsItsPlaceAmongOthers) {
  connect(3);
  const auto exchanges = exchangesOf({5, 0, 400});
  std::vector<std::vector<float>> before(3, std::vector<float>(9, 1.0F)), after = before;
  std::vector<std::shared_ptr<OpState>> states;
  for (const int rank : {2, 0, 1}) {  // the last comes when the others wait
    const auto at = static_cast<size_t>(rank);
    states.push_back(issue(rank, allreduceOf(before[at])));
    states.push_back(issue(rank, operationWith(exchanges[at])));
    states.push_back(issue(rank, allreduceOf(after[at])));
  }
  expectSuccess(states);
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(exchanges[rank]->begun, 1);
    EXPECT_EQ(exchanges[rank]->all()[2], std::vector<float>(400, 1.0F));
    EXPECT_TRUE(exchanges[rank]->all()[1].empty());
    EXPECT_EQ(after[rank], std::vector<float>(9, 3.0F));
  }
}

TEST_F(RunnerTest, OperationOfSeveralExchangesMayFindAMismatch) {
  connect(2);
  const auto exchanges = exchangesOf({1, 2000});
  for (const int rank : {0, 1}) issue(rank, operationWith(exchanges[static_cast<size_t>(rank)]));
  const Failure failure = failureOf(0);
  EXPECT_EQ(failure.kind, FailureKind::kMismatch);
  EXPECT_EQ(failure.cause.how, "it is too long");
}

TEST_F(RunnerTest, OperationCancelledBetweenItsExchangesIsReturned) {
  connect(2);
  const auto exchanges = exchangesOf({4, 4});
  const auto state = issue(0, operationWith(exchanges[0]));
  test.on([&] {
    EXPECT_TRUE(at(0).runner->needs(1));
    const auto cancelled = at(0).runner->cancelAll();
    ASSERT_EQ(cancelled.size(), 1U);
    EXPECT_EQ(cancelled[0].first, state);
  });
  EXPECT_FALSE(state->done());
}

}  // namespace
}  // namespace torchft_ext
