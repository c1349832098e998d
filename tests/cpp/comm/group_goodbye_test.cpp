// Members that leave as soon as they are through.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "cpp/comm/cluster.h"
#include "cpp/comm/throwing_hook.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

TEST(GroupGoodbye, RightAfterABarrierHarmsNobodyWhoIsStillInIt) {
  for (int round = 0; round < 5; ++round) {
    Cluster cluster(8);
    cluster.form(cluster.all(), "leave");
    cluster.onAll([&](int i) {
      Operation barrier;
      barrier.kind = OpKind::kBarrier;
      const FailurePtr failure = finish(cluster.group(i).issue(std::move(barrier)));
      EXPECT_EQ(failure, nullptr) << "rank " << i << ": " << failure->describe();
      EXPECT_TRUE(cluster.group(i).shutdown(Deadline::after(kTestLimit)));
    });
  }
}

Operation broadcastFrom(std::vector<float>& values, int root) {
  Operation operation;
  operation.kind = OpKind::kBroadcast;
  operation.root = root;
  operation.dtype = DType::kFloat;
  operation.outputs = {{reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(float)}};
  return operation;
}

// Rank 1 issues what ranks 0 and 2 have completed, and one of them has left.
TEST(GroupGoodbye, LeavesWhatTheLeaverHasDoneToThoseWhoComeLater) {
  for (const int root : {0, 2}) {
    Cluster cluster(3);
    cluster.form(cluster.all(), "leave");
    std::vector<float> zeroth(10, root == 0 ? 5.0F : 0.0F);
    std::vector<float> second(10, root == 2 ? 5.0F : 0.0F);
    std::vector<float> late(10, 0.0F);
    auto of_zeroth = cluster.group(0).issue(broadcastFrom(zeroth, root));
    auto of_second = cluster.group(2).issue(broadcastFrom(second, root));
    EXPECT_EQ(finish(of_zeroth), nullptr);
    EXPECT_EQ(finish(of_second), nullptr);
    EXPECT_TRUE(cluster.group(2).shutdown(Deadline::after(kTestLimit)));
    const FailurePtr failure = finish(cluster.group(1).issue(broadcastFrom(late, root)));
    EXPECT_EQ(failure, nullptr) << "root " << root << ": " << failure->describe();
    EXPECT_EQ(late, std::vector<float>(10, 5.0F)) << "root " << root;
  }
}

// As above, and rank 1 has read the goodbye before it begins: no data of the leaver's lies ahead of
// that.
TEST(GroupGoodbye, ReadBeforeAnOperationLeavesWhatTheLeaverHasDoneInIt) {
  Cluster cluster(3);
  cluster.form(cluster.all(), "leave");
  std::vector<float> zeroth(10, 5.0F);
  std::vector<float> second(10, 0.0F);
  std::vector<float> late(10, 0.0F);
  auto of_zeroth = cluster.group(0).issue(broadcastFrom(zeroth, 0));
  EXPECT_EQ(finish(cluster.group(2).issue(broadcastFrom(second, 0))), nullptr);
  EXPECT_EQ(finish(of_zeroth), nullptr);
  EXPECT_TRUE(cluster.group(2).shutdown(Deadline::after(kTestLimit)));
  std::vector<float> outgoing(1);
  std::vector<float> incoming(1);
  auto sent = cluster.group(0).issue(sendOf(outgoing, 1));  // comes after the goodbye
  EXPECT_EQ(finish(cluster.group(1).issue(recvOf(incoming, 0))), nullptr);
  EXPECT_EQ(finish(sent), nullptr);
  const FailurePtr failure = finish(cluster.group(1).issue(broadcastFrom(late, 0)));
  EXPECT_EQ(failure, nullptr) << failure->describe();
  EXPECT_EQ(late, std::vector<float>(10, 5.0F));
  const FailurePtr after = cluster.group(1).errored();
  EXPECT_EQ(after, nullptr) << after->describe();
}

Operation barrier() {
  Operation operation;
  operation.kind = OpKind::kBarrier;
  return operation;
}

// Three members that have each done a broadcast of rank 0's, but for rank 1, which has not begun
// it. Rank 2 has left, for want of it rank 0 has failed, and rank 1 has been told of that.
class GroupGoodbyeOvertaken : public testing::Test {
 protected:
  void SetUp() override {
    cluster_.form(cluster_.all(), "leave");
    auto of_zeroth = cluster_.group(0).issue(broadcastFrom(zeroth_, 0));
    EXPECT_EQ(finish(cluster_.group(2).issue(broadcastFrom(second_, 0))), nullptr);
    EXPECT_EQ(finish(of_zeroth), nullptr);
    EXPECT_TRUE(cluster_.group(2).shutdown(Deadline::after(kTestLimit)));
    expectCausedByLeaver(finish(cluster_.group(0).issue(barrier())));
    // what rank 1 reads changes nothing that it tells of
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(cluster_.group(1).errored(), nullptr);
  }

  static void expectCausedByLeaver(const FailurePtr& failure) {
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kPeerLeft) << failure->describe();
    EXPECT_EQ(failure->cause.rank, 2) << failure->describe();
  }

  Cluster cluster_ = Cluster(3);
  std::vector<float> zeroth_ = std::vector<float>(10, 5.0F);
  std::vector<float> second_ = std::vector<float>(10, 0.0F);
  std::vector<float> late_ = std::vector<float>(10, 0.0F);
};

TEST_F(GroupGoodbyeOvertaken, LeavesWhatAFasterMemberHasDoneAndNothingMore) {
  const FailurePtr failure = finish(cluster_.group(1).issue(broadcastFrom(late_, 0)));
  EXPECT_EQ(failure, nullptr) << failure->describe();
  EXPECT_EQ(late_, std::vector<float>(10, 5.0F));
  expectCausedByLeaver(finish(cluster_.group(1).issue(barrier())));
}

TEST_F(GroupGoodbyeOvertaken, IsToldOfOnceTheSlowerMemberHasComeAsFar) {
  EXPECT_EQ(finish(cluster_.group(1).issue(broadcastFrom(late_, 0))), nullptr);
  EXPECT_TRUE(waitFor([&] { return cluster_.group(1).errored() != nullptr; }));
  expectCausedByLeaver(cluster_.group(1).errored());
}

TEST_F(GroupGoodbyeOvertaken, LeavesWhatAMemberHasDoneThatHasGoneSince) {
  cluster_.members[0]->group->abort("it goes");
  cluster_.members[0].reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const FailurePtr failure = finish(cluster_.group(1).issue(broadcastFrom(late_, 0)));
  EXPECT_EQ(failure, nullptr) << failure->describe();
  EXPECT_EQ(late_, std::vector<float>(10, 5.0F));
}

TEST_F(GroupGoodbyeOvertaken, EndsMessagesAtOnce) {
  std::vector<float> message(1);
  expectCausedByLeaver(finish(cluster_.group(1).issue(recvOf(message, 0))));
}

TEST_F(GroupGoodbyeOvertaken, LetsTheSlowerMemberLeaveToo) {
  EXPECT_EQ(finish(cluster_.group(1).issue(broadcastFrom(late_, 0))), nullptr);
  EXPECT_TRUE(cluster_.group(1).shutdown(Deadline::after(kTestLimit)));
}

// It waits for a message that nobody sends.
TEST(GroupGoodbye, IsLeftWhenASignalsHandlerThrowsAndTheOtherIsTold) {
  Cluster cluster(2);
  cluster.form(cluster.all(), "leave");
  std::vector<float> values(10);
  const auto state = cluster.group(0).issue(recvOf(values, 1));
  {
    const ThrowingHook hook;
    EXPECT_THROW(cluster.group(0).shutdown(Deadline::after(kTestLimit)), Interrupted);
  }
  const FailurePtr failure = finish(state);
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kAborted) << failure->describe();
  EXPECT_NE(failure->describe().find("shutdown() was interrupted"), std::string::npos)
      << failure->describe();
  EXPECT_TRUE(waitFor([&] { return cluster.group(1).errored() != nullptr; }));
  EXPECT_EQ(cluster.group(1).errored()->cause.rank, 0);
  cluster.group(0).shutdown(Deadline::after(kTestLimit));  // again: it has ended
}

}  // namespace
}  // namespace torchft_ext
