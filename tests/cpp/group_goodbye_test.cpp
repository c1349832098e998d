// Members that leave as soon as they are through.
#include <gtest/gtest.h>

#include "cluster.h"
#include "throwing_hook.h"
#include "wait_for.h"

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
