// Operations that begin as one: all of them belong to the current generation, or none is begun.
#include <gtest/gtest.h>

#include "cpp/comm/cluster.h"

namespace torchft_ext {
namespace {

TEST(GroupBatch, ExchangesWithoutAnOrderOfItsOwn) {
  Cluster cluster(2);
  cluster.form(cluster.all(), "batch");
  cluster.onAll([&](int i) {
    std::vector<float> mine(1000, static_cast<float>(i));
    std::vector<float> other(1000, -1.0F);
    std::vector<Operation> batch = {sendOf(mine, 1 - i), recvOf(other, 1 - i)};
    for (const auto& state : cluster.group(i).issueTogether(std::move(batch))) {
      EXPECT_EQ(finish(state), nullptr);
    }
    EXPECT_EQ(other, std::vector<float>(1000, static_cast<float>(1 - i)));
  });
}

TEST(GroupBatch, ThatStraddlesTwoGenerationsIsRefusedAsAWhole) {
  Cluster cluster(2);
  cluster.form(cluster.all(), "first");
  std::vector<float> values(10, 1.0F);
  std::vector<float> received(10, 0.0F);
  Operation earlier = sendOf(values, 1);
  earlier.generation = cluster.group(0).generation();
  cluster.form(cluster.all(), "second");
  Operation later = sendOf(values, 1);
  later.generation = cluster.group(0).generation();
  std::vector<Operation> batch = {later, earlier};
  for (const auto& state : cluster.group(0).issueTogether(std::move(batch))) {
    ASSERT_TRUE(state->done());
    ASSERT_NE(state->failure(), nullptr);
    EXPECT_EQ(state->failure()->kind, FailureKind::kAborted);
  }
  // The generation is unharmed, and nothing of the batch has arrived: the next message is the
  // first.
  std::vector<float> next(10, 7.0F);
  auto receiving = cluster.group(1).issue(recvOf(received, 0));
  EXPECT_EQ(finish(cluster.group(0).issue(sendOf(next, 1))), nullptr);
  EXPECT_EQ(finish(receiving), nullptr);
  EXPECT_EQ(received, next);
}

TEST(GroupBatch, OfAFailedGenerationTouchesNothing) {
  Cluster cluster(1);
  cluster.form({0}, "lost");
  cluster.group(0).abort("a test said so");
  std::vector<float> values(10, 1.0F);
  std::vector<Operation> batch = {allreduceOf(values), allreduceOf(values)};
  const auto states = cluster.group(0).issueTogether(std::move(batch));
  EXPECT_EQ(states.size(), 2U);
  for (const auto& state : states) {
    ASSERT_TRUE(state->done());
    EXPECT_EQ(state->failure()->kind, FailureKind::kAborted);
  }
}

}  // namespace
}  // namespace torchft_ext
