// What ends a generation on device memory, in each state of its communicators: who is released,
// what is aborted in which order, what is left. Over the NCCL engine and the simulator.
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "base/threads.h"
#include "cpp/nccl/nccl_cluster.h"

namespace torchft_ext {
namespace {

using Values = std::vector<float>;

void succeed(const std::shared_ptr<OpState>& state) {
  const FailurePtr failure = finish(state);
  ASSERT_EQ(failure, nullptr) << failure->describe();
}

void expectSum(Cluster& cluster, const std::vector<int>& which) {
  Cluster::on(which, [&](int i) {
    const Floats values = floats(i, Values(10, 1));
    succeed(cluster.group(i).issue(deviceAllreduce(values)));
    EXPECT_EQ(values->read(), Values(10, static_cast<float>(which.size())));
  });
}

FailurePtr allreduceFails(Cluster& cluster, int i) {
  const FailurePtr failure =
      finish(cluster.group(i).issue(deviceAllreduce(floats(i, Values(10, 1)))));
  EXPECT_NE(failure, nullptr);
  return failure;
}

int openDescriptors() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    static_cast<void>(entry);
    ++count;
  }
  return count;
}

class NcclFailureTest : public NcclTest {
 protected:
  // `others` are in an allreduce that `by` does not join; `by` aborts once `when` holds.
  void abortReleases(Cluster& cluster, const std::vector<int>& others, int by,
                     const std::function<bool()>& when) {
    std::thread aborting([&] {
      EXPECT_TRUE(waitFor(when));
      cluster.group(by).abort("a test said so");
    });
    Cluster::on(others, [&](int i) {
      const FailurePtr failure = allreduceFails(cluster, i);
      if (!failure) return;
      EXPECT_EQ(failure->kind, FailureKind::kAborted) << failure->describe();
      EXPECT_EQ(failure->cause.rank, by) << failure->describe();
      EXPECT_EQ(failure->op, "allreduce");
    });
    aborting.join();
  }
};

// ---- one failure in each state

TEST_F(NcclFailureTest, AbortWhileIdsAreExchanged) {
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "a");
  abortReleases(cluster, {1, 2}, 0, [] { return true; });
  EXPECT_EQ(counted("inits"), 0);
  cluster.form(cluster.all(), "b");
  expectSum(cluster, cluster.all());
}

TEST_F(NcclFailureTest, AbortWhileRanksAwaitInNcclTheOneThatDoesNotCome) {
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "a");
  inject("block init rank=2");
  std::thread blocked([&] { allreduceFails(cluster, 2); });
  std::thread aborted([&] { allreduceFails(cluster, 1); });
  abortReleases(cluster, {0}, 1, [&] { return counted("inits") == 2; });
  aborted.join();
  inject("clear");
  blocked.join();
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().roots == 0; }));
  cluster.form(cluster.all(), "b");
  expectSum(cluster, cluster.all());
}

TEST_F(NcclFailureTest, AbortOfAnInitThatHangs) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  inject("hang init rank=0");
  std::thread aborting([&] {
    EXPECT_TRUE(waitFor([&] { return counted("inits") == 2; }));
    cluster.group(1).abort("init hangs");
  });
  cluster.onAll([&](int i) { allreduceFails(cluster, i); });
  aborting.join();
  inject("clear");
  cluster.form(cluster.all(), "b");
  expectSum(cluster, cluster.all());
}

TEST_F(NcclFailureTest, AbortInMidOperation) {
  NcclCluster cluster(4);
  cluster.form(cluster.all(), "a");
  expectSum(cluster, cluster.all());
  abortReleases(cluster, {0, 1, 2}, 3, [&] { return counted("allreduce") == 7; });
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators == 0; }));
  cluster.form({3, 1, 0}, "b");
  expectSum(cluster, {3, 1, 0});
}

TEST_F(NcclFailureTest, AbortWhileACallIsInProgress) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  expectSum(cluster, cluster.all());
  inject("in_progress allreduce rank=0 polls=1000000000");
  abortReleases(cluster, {0}, 1, [&] { return counted("allreduce") == 3; });
  inject("clear");
  cluster.form(cluster.all(), "b");
  expectSum(cluster, cluster.all());
}

// The goodbye has no time for it, and nobody fails a generation that has ended.
TEST_F(NcclFailureTest, AGoodbyeEndsWhatIsUnderWayStill) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  expectSum(cluster, cluster.all());
  const auto state = cluster.group(0).issue(deviceAllreduce(floats(0, Values(10, 1))));
  cluster.group(0).shutdown(Deadline::after(milliseconds(50)));
  EXPECT_NE(finish(state), nullptr);
  // The other one's may stay: whether its generation failed too is a question of time.
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators <= 1; }));
}

TEST_F(NcclFailureTest, AbortWhileIdleFreesTheCommunicators) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  expectSum(cluster, cluster.all());
  EXPECT_EQ(sim::ncclSnapshot().communicators, 2);
  cluster.group(0).abort("idle");
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators == 0; }));
  EXPECT_EQ(allreduceFails(cluster, 1)->cause.rank, 0);
  EXPECT_EQ(counted("finalizes"), 0);
}

TEST_F(NcclFailureTest, AllCommunicatorsOfTheGenerationAreAborted) {
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "a");
  expectSum(cluster, cluster.all());
  cluster.onAll([&](int rank) {
    const Floats out = floats(rank, {1});
    const Floats in = floats(rank, {0});
    for (const auto& state : cluster.group(rank).issueTogether(
             {deviceSend(out, (rank + 1) % 3), deviceRecv(in, (rank + 2) % 3)}))
      succeed(state);
  });
  EXPECT_EQ(sim::ncclSnapshot().communicators, 9);
  cluster.group(1).abort("all of them");
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators == 0; }));
  EXPECT_EQ(counted("revokes"), blockingCalls() ? 0 : 9);  // which would block
  EXPECT_EQ(counted("aborts"), 9);
}

TEST_F(NcclFailureTest, AbortWithoutRevokeWorksToo) {
  inject("version 22703");
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "a");
  expectSum(cluster, cluster.all());
  abortReleases(cluster, {0, 2}, 1, [&] { return counted("allreduce") == 5; });
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators == 0; }));
  EXPECT_EQ(counted("revokes"), 0);
}

TEST_F(NcclFailureTest, ABlockedAbortHoldsUpNeitherWaitersNorTheNextGeneration) {
  setAbortLimitForTest(milliseconds(100));
  allow_stuck = true;
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  expectSum(cluster, cluster.all());
  inject("block abort count=2");
  abortReleases(cluster, {0}, 1, [&] { return counted("allreduce") == 3; });
  cluster.form(cluster.all(), "b");
  expectSum(cluster, cluster.all());
  EXPECT_TRUE(waitFor([] { return threadSnapshot().stuck > 0; }));
  inject("clear");
  EXPECT_TRUE(waitFor([] { return threadSnapshot().stuck == 0; }));
  setAbortLimitForTest(std::chrono::seconds(10));
}

// ---- other ends

TEST_F(NcclFailureTest, TheDeadlineOfAnOperationIsToldToEveryRank) {
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "a");
  expectSum(cluster, cluster.all());
  Operation hurried = deviceAllreduce(floats(1, Values(10, 1)));
  hurried.timeout = milliseconds(100);
  const FailurePtr own = finish(cluster.group(1).issue(std::move(hurried)));
  ASSERT_NE(own, nullptr);
  EXPECT_EQ(own->kind, FailureKind::kTimeout);
  EXPECT_EQ(allreduceFails(cluster, 0)->cause.rank, 1);
}

TEST_F(NcclFailureTest, TheDeadlineEndsTheWaitForACommunicator) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  for (const int rank : {0, 1}) {
    Operation hurried = deviceAllreduce(floats(rank, Values(10, 1)));
    hurried.timeout = milliseconds(100);
    const FailurePtr failure = finish(cluster.group(rank).issue(std::move(hurried)));
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kTimeout) << failure->describe();
  }
}

TEST_F(NcclFailureTest, AnAsynchronousErrorOfOneRankFailsAll) {
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "a");
  expectSum(cluster, cluster.all());
  inject("async_error allreduce rank=2 code=6");
  cluster.onAll([&](int i) {
    const FailurePtr failure = allreduceFails(cluster, i);
    if (!failure) return;
    EXPECT_EQ(failure->kind, FailureKind::kConnectionLost) << failure->describe();
    EXPECT_NE(failure->describe().find("NCCL"), std::string::npos) << failure->describe();
  });
}

TEST_F(NcclFailureTest, ACallThatFailsFailsTheGeneration) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  inject("fail allreduce rank=0 code=4");
  cluster.onAll([&](int i) {
    const FailurePtr failure = allreduceFails(cluster, i);
    if (!failure) return;
    EXPECT_EQ(failure->kind, FailureKind::kInternal) << failure->describe();
  });
}

TEST_F(NcclFailureTest, AMemberThatIsDestroyedIsLostToTheOthersInMidOperation) {
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "a");
  expectSum(cluster, cluster.all());
  std::thread destroying([&] {
    EXPECT_TRUE(waitFor([&] { return counted("allreduce") == 5; }));
    cluster.members[2].reset();
  });
  Cluster::on({0, 1}, [&](int i) {
    const FailurePtr failure = allreduceFails(cluster, i);
    if (!failure) return;
    EXPECT_EQ(failure->cause.rank, 2) << failure->describe();
  });
  destroying.join();
  cluster.form({0, 1}, "b");
  expectSum(cluster, {0, 1});
}

// ---- what stays after an abort

TEST_F(NcclFailureTest, BuffersAreKeptUntilTheStreamHasDrained) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  expectSum(cluster, cluster.all());
  Floats values = floats(0, Values(10, 1));
  const std::weak_ptr<DeviceArray<float>> watched = values;
  const c10::Stream stream = anotherOn(deviceOf(0));
  const auto gate = sim::stall(stream);
  Operation operation = deviceAllreduce(values);
  operation.device = std::make_shared<StreamSide>(stream);
  values.reset();
  const auto state = cluster.group(0).issue(std::move(operation));
  cluster.group(0).abort("with work queued before it");
  EXPECT_NE(finish(state), nullptr);
  // The poller has looked at it again since, and kept it.
  EXPECT_TRUE(waitFor([] { return sharedNcclThreads()->poller->counts().draining == 1; }));
  EXPECT_FALSE(watched.expired());
  gate->open();
  EXPECT_TRUE(waitFor([&] { return watched.expired(); }));
}

TEST_F(NcclFailureTest, AStreamThatWaitsForADeadOperationGetsOn) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  expectSum(cluster, cluster.all());
  Operation operation = deviceAllreduce(floats(0, Values(10, 1)));
  const auto side = std::static_pointer_cast<StreamSide>(operation.device);
  cluster.group(0).issue(std::move(operation));
  const c10::Stream user = anotherOn(deviceOf(0));
  side->end->block(user);
  EXPECT_FALSE(user.query());
  cluster.group(0).abort("free it");
  EXPECT_TRUE(waitFor([&] { return user.query(); }));
}

// ---- leaks

TEST_F(NcclFailureTest, OneHundredGenerationsLeaveThreadsDescriptorsAndMemoryFlat) {
  NcclCluster cluster(2);
  size_t threads = 0;
  int descriptors = 0;
  size_t memory = 0;
  for (int generation = 0; generation < 100; ++generation) {
    cluster.form({0, 1}, "same");
    expectSum(cluster, {0, 1});
    if (generation % 2 == 1) {
      // Every other generation ends in mid-operation.
      const auto state = cluster.group(0).issue(deviceAllreduce(floats(0, Values(10, 1))));
      cluster.group(1).abort("next");
      EXPECT_NE(finish(state), nullptr);
    }
    if (generation % 33 != 0) continue;
    cluster.onAll([&](int i) { cluster.group(i).abort("look"); });
    ASSERT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators == 0; }));
    if (generation > 33) {
      EXPECT_TRUE(waitFor([&] { return threadSnapshot().running.size() <= threads; }))
          << threadSnapshot().running.size() << " threads, " << threads << " before";
      EXPECT_TRUE(waitFor([&] { return openDescriptors() <= descriptors; }));
      EXPECT_TRUE(waitFor([&] { return sim::liveAllocations() <= memory; }));
    } else {
      threads = threadSnapshot().running.size();
      descriptors = openDescriptors();
      memory = sim::liveAllocations();
    }
  }
  EXPECT_EQ(sim::ncclSnapshot().roots, 0);
}

}  // namespace
}  // namespace torchft_ext
