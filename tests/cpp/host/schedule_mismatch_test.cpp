#include <gtest/gtest.h>

#include "cpp/host/runner_test.h"

namespace torchft_ext {
namespace {

class ScheduleMismatchTest : public RunnerTest {};

TEST_F(ScheduleMismatchTest, ADifferentOperationIsAMismatchThatNamesBoth) {
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

TEST_F(ScheduleMismatchTest, ADifferentSizeIsAMismatch) {
  connect(2);
  std::vector<float> first(10, 1.0F), second(11, 1.0F);
  const auto one = issue(0, allreduceOf(first));
  const auto other = issue(1, allreduceOf(second));
  EXPECT_TRUE(contains(failureOf(0).cause.how, "other sizes"));
  EXPECT_EQ(failureOf(1).kind, FailureKind::kMismatch);
  EXPECT_FALSE(one->done() || other->done());
}

TEST_F(ScheduleMismatchTest, ADifferentReductionIsAMismatch) {
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

TEST_F(ScheduleMismatchTest, AFrameOfAnotherLengthIsAMismatch) {
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

TEST_F(ScheduleMismatchTest, AFrameNobodyExpectsIsAMismatch) {
  connect(2);
  std::vector<std::vector<float>> in0{{1}, {2}}, out0{{0}, {0}}, in1{{4}, {5}}, out1{{}, {0}};
  issue(0, alltoallOf(in0, out0));
  issue(1, alltoallOf(in1, out1));
  EXPECT_EQ(failureOf(1).kind, FailureKind::kMismatch);
}

TEST_F(ScheduleMismatchTest, APeerThatWentOnWithoutSendingIsAMismatch) {
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

}  // namespace
}  // namespace torchft_ext
