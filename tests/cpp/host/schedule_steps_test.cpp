// Operations that are more than one schedule: tensors with strides, and several exchanges in one
// place.
#include <gtest/gtest.h>

#include <algorithm>

#include "cpp/host/runner_test.h"
#include "host/turn.h"

namespace torchft_ext {
namespace {

class ScheduleStepsTest : public RunnerTest {};

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

TEST_F(ScheduleStepsTest, ContributionsAreLoadedWhenTheirTurnHasCome) {
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

TEST_F(ScheduleStepsTest, LongLoadsAndStoresLetTheLoopGoOn) {
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

TEST_F(ScheduleStepsTest, NothingIsStoredOnceItIsCancelled) {
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

TEST_F(ScheduleStepsTest, OperationOfSeveralExchangesKeepsItsPlaceAmongOthers) {
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

TEST_F(ScheduleStepsTest, OperationOfSeveralExchangesMayFindAMismatch) {
  connect(2);
  const auto exchanges = exchangesOf({1, 2000});
  for (const int rank : {0, 1}) issue(rank, operationWith(exchanges[static_cast<size_t>(rank)]));
  const Failure failure = failureOf(0);
  EXPECT_EQ(failure.kind, FailureKind::kMismatch);
  EXPECT_EQ(failure.cause.how, "it is too long");
}

TEST_F(ScheduleStepsTest, OperationCancelledBetweenItsExchangesIsReturned) {
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
