// Before a group has had a generation, nobody knows the others: those who come late have to be
// told.
#include <gtest/gtest.h>

#include <thread>

#include "cpp/comm/cluster.h"
#include "cpp/support/wait_for.h"
#include "membership/records.h"

namespace torchft_ext {
namespace {

// Rank 2 aborts before rank 1 has come; rank 1 comes once rank 0 has been told. What its
// configure() ends with.
FailurePtr failureOfTheLateOne() {
  Cluster cluster(3);
  std::vector<std::thread> threads;
  for (const int rank : {0, 2}) {
    threads.emplace_back([&cluster, rank] {
      cluster.members[static_cast<size_t>(rank)]->configure("run", rank, 3);
    });
  }
  for (const char* key : {"run/0", "run/2"})
    EXPECT_TRUE(waitFor([&] { return cluster.data->peek(key).has_value(); }));
  cluster.group(2).abort("a test said so");
  EXPECT_TRUE(waitFor(
      [&] { return decodeFailureRecord(cluster.data->peek("run/0").value_or("")).has_value(); }));
  const FailurePtr failure = cluster.members[1]->configure("run", 1, 3, std::chrono::seconds(5));
  for (auto& thread : threads) thread.join();
  return failure;
}

TEST(FirstGeneration, AMembersEndIsToldToTheOneThatComesWhenTheLeaderHasEnded) {
  FailurePtr failure;
  // A machine that stalls for longer than the leader waits costs a round.
  for (int round = 0; round < 5 && !(failure && failure->cause.rank == 2); ++round)
    failure = failureOfTheLateOne();
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kAborted) << failure->describe();
  EXPECT_EQ(failure->cause.rank, 2) << failure->describe();
}

}  // namespace
}  // namespace torchft_ext
