// What is called when a generation fails.
#include "c10d/group/abort_hooks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "cpp/comm/cluster.h"
#include "cpp/support/captured_log.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

TEST(AbortHooks, RunOnceForEachGenerationThatFailsThoughOneThrows) {
  const CapturedLog log;
  const auto hooks = std::make_shared<AbortHooks>();
  std::atomic<int> calls{0};
  EXPECT_TRUE(hooks->table().add(1, [] { throw std::runtime_error("of its own"); }));
  EXPECT_TRUE(hooks->table().add(2, [&] { ++calls; }));
  EXPECT_FALSE(hooks->table().add(2, [] {})) << "that id is taken";
  Cluster cluster(1);
  ClusterMember& member = *cluster.members[0];
  member.group = std::make_unique<Group>("test", member.engine, std::make_shared<Watchdog>(),
                                         kTestLimit, [hooks] { hooks->call(); });
  for (int generation = 1; generation <= 3; ++generation) {
    cluster.form({0}, std::to_string(generation));
    cluster.group(0).abort("enough");
    cluster.group(0).abort("again");
    EXPECT_TRUE(waitFor([&] { return calls == generation; })) << calls;
  }
  EXPECT_TRUE(waitFor([] { return CapturedLog::contains("abort hook 1 threw: of its own"); }));
  EXPECT_TRUE(hooks->table().remove(2));
  EXPECT_FALSE(hooks->table().remove(2));
  cluster.form({0}, "last");
  EXPECT_TRUE(cluster.group(0).shutdown(testDeadline()));
  EXPECT_EQ(calls, 3);
}

}  // namespace
}  // namespace torchft_ext
