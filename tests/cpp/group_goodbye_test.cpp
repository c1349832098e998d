// Members that leave as soon as they are through.
#include <gtest/gtest.h>

#include "cluster.h"

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

}  // namespace
}  // namespace torchft_ext
