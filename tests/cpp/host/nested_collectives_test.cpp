// Collectives issued in callbacks: named by where they were issued, beside the threads' order.
#include "host/nested_collectives.h"

#include <gtest/gtest.h>

#include <numeric>

#include "cpp/comm/cluster.h"

namespace torchft_ext {
namespace {

// As in a callback of the future of the collective that has this path.
std::shared_ptr<OpState> issueIn(Group& group, const CallbackPath& callback, Operation operation) {
  const CallbackScope scope(callback);
  return group.issue(std::move(operation));
}

std::vector<float> rising(size_t count, int rank) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), static_cast<float>(rank));
  return values;
}

std::vector<float> sumOfRising(size_t count, int size) {
  std::vector<float> sum(count, 0.0F);
  for (int rank = 0; rank < size; ++rank) {
    const std::vector<float> one = rising(count, rank);
    for (size_t i = 0; i < count; ++i) sum[i] += one[i];
  }
  return sum;
}

class NestedCollectivesTest : public ::testing::Test {
 protected:
  void form(int size) {
    cluster = std::make_unique<Cluster>(size);
    cluster->form(cluster->all(), "nested");
  }
  std::unique_ptr<Cluster> cluster;
};

TEST_F(NestedCollectivesTest, GiveTheSameSumsInEveryWorldAndSize) {
  for (const int size : {1, 2, 3, 5, 9}) {
    form(size);
    for (const size_t count : {0, 1, 1025, 400000}) {
      cluster->onAll([&](int i) {
        std::vector<float> first(3, 1.0F);
        std::vector<float> second = rising(count, i);
        const auto root = cluster->group(i).issue(allreduceOf(first));
        const auto nested =
            issueIn(cluster->group(i), root->path()->callback(0), allreduceOf(second));
        EXPECT_EQ(finish(nested), nullptr);
        EXPECT_EQ(finish(root), nullptr);
        EXPECT_EQ(second, sumOfRising(count, size));
      });
    }
  }
}

// Rank 0's callback runs before its thread goes on, and waits; the others' run long after.
TEST_F(NestedCollectivesTest, PassTheThreadsOrderAndEachOther) {
  form(3);
  cluster->onAll([&](int i) {
    Group& group = cluster->group(i);
    std::vector<float> ordered(100000, 1.0F);
    std::vector<float> root_values(3, 1.0F);
    std::vector<float> one = rising(50000, i);
    std::vector<float> two = rising(1000, i);
    const auto root = group.issue(allreduceOf(root_values));
    const auto first = root->path()->callback(0);
    const auto second = root->path()->callback(1);
    std::shared_ptr<OpState> later;
    if (i == 0) {
      EXPECT_EQ(finish(issueIn(group, second, allreduceOf(two))), nullptr);
      EXPECT_EQ(finish(issueIn(group, first, allreduceOf(one))), nullptr);
      later = group.issue(allreduceOf(ordered));
    } else {
      later = group.issue(allreduceOf(ordered));
      const auto pending = issueIn(group, first, allreduceOf(one));
      EXPECT_EQ(finish(issueIn(group, second, allreduceOf(two))), nullptr);
      EXPECT_EQ(finish(pending), nullptr);
    }
    EXPECT_EQ(finish(later), nullptr);
    EXPECT_EQ(ordered, std::vector<float>(100000, 3.0F));
    EXPECT_EQ(one, sumOfRising(50000, 3));
    EXPECT_EQ(two, sumOfRising(1000, 3));
  });
}

TEST_F(NestedCollectivesTest, HaveNoNumberInTheThreadsOrder) {
  form(2);
  cluster->onAll([&](int i) {
    Group& group = cluster->group(i);
    std::vector<float> values(3, 1.0F);
    const auto root = group.issue(allreduceOf(values));
    EXPECT_EQ(finish(root), nullptr);
    std::vector<float> inner(3, 1.0F);
    const auto nested = issueIn(group, root->path()->callback(0), allreduceOf(inner));
    EXPECT_EQ(nested->seq(), OpState::kNoSeq);
    EXPECT_EQ(finish(nested), nullptr);
    std::vector<float> next(3, 1.0F);
    const auto after = group.issue(allreduceOf(next));
    EXPECT_EQ(after->seq(), root->seq() + 1);
    EXPECT_EQ(finish(after), nullptr);
  });
}

TEST_F(NestedCollectivesTest, OfOtherKindsUnderOneNameFailTheGeneration) {
  form(2);
  cluster->onAll([&](int i) {
    Group& group = cluster->group(i);
    std::vector<float> values(3, 1.0F);
    const auto root = group.issue(allreduceOf(values));
    EXPECT_EQ(finish(root), nullptr);
    std::vector<float> inner(3, 1.0F);
    const auto kind = i == 0 ? ReduceKind::kSum : ReduceKind::kMax;
    const auto nested = issueIn(group, root->path()->callback(0), allreduceOf(inner, kind));
    const FailurePtr failure = finish(nested);
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kMismatch);
    EXPECT_NE(failure->describe().find("issued in a callback of allreduce #1"), std::string::npos)
        << failure->describe();
  });
}

TEST_F(NestedCollectivesTest, OfACallbackWithoutANameNeverPairWithAThreads) {
  form(2);
  cluster->onAll([&](int i) {
    Group& group = cluster->group(i);
    std::vector<float> values(3, 1.0F);
    std::optional<CallbackScope> nameless;
    if (i == 0) nameless.emplace(std::nullopt);
    const FailurePtr failure = finish(group.issue(allreduceOf(values)));
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kMismatch);
    EXPECT_NE(failure->describe().find("issued in a callback"), std::string::npos)
        << failure->describe();
  });
}

TEST_F(NestedCollectivesTest, OfAPeerThatStaysAwayEndByTheirLimit) {
  form(2);
  std::vector<float> values(3, 1.0F);
  std::vector<float> others(3, 1.0F);
  const auto root = cluster->group(0).issue(allreduceOf(values));
  EXPECT_EQ(finish(cluster->group(1).issue(allreduceOf(others))), nullptr);
  std::vector<float> inner(300000, 1.0F);
  Operation operation = allreduceOf(inner);
  operation.timeout = std::chrono::milliseconds(300);
  const auto nested = issueIn(cluster->group(0), root->path()->callback(0), std::move(operation));
  const FailurePtr failure = finish(nested);
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kTimeout);
  EXPECT_NE(failure->describe().find("allreduce issued in a callback of allreduce #1"),
            std::string::npos)
      << failure->describe();
}

TEST_F(NestedCollectivesTest, AreReleasedByAnAbortInTheirMiddle) {
  form(2);
  for (int round = 0; round < 5; ++round) {
    cluster->onAll([&](int i) {
      Group& group = cluster->group(i);
      std::vector<float> values(3, 1.0F);
      std::vector<float> inner(1000000, 1.0F);
      const auto root = group.issue(allreduceOf(values));
      finish(root);  // the other may have aborted already
      const auto nested = issueIn(group, root->path()->callback(0), allreduceOf(inner));
      if (i == 0) group.abort("a test said so");
      finish(nested);  // that it ends
      // No late access: the memory goes now, and the sanitizers look.
    });
    cluster->form(cluster->all(), "round " + std::to_string(round));
  }
}

TEST_F(NestedCollectivesTest, FailWhereThePeerHasLeft) {
  form(2);
  std::vector<float> values(3, 1.0F);
  std::vector<float> others(3, 1.0F);
  const auto root = cluster->group(0).issue(allreduceOf(values));
  EXPECT_EQ(finish(cluster->group(1).issue(allreduceOf(others))), nullptr);
  EXPECT_EQ(finish(root), nullptr);
  EXPECT_TRUE(cluster->group(1).shutdown(Deadline::after(kTestLimit)));
  std::vector<float> inner(3, 1.0F);
  const FailurePtr failure =
      finish(issueIn(cluster->group(0), root->path()->callback(0), allreduceOf(inner)));
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kPeerLeft);
}

}  // namespace
}  // namespace torchft_ext
