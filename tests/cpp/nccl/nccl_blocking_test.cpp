// Blocking communicators, where a call of one thread is ended by the abort of another. Their
// operations, failures and races are those of the suites that run a second time with them; here is
// what they alone have.
#include <gtest/gtest.h>

#include <thread>

#include "base/threads.h"
#include "cpp/comm/throwing_hook.h"
#include "cpp/nccl/nccl_cluster.h"
#include "cpp/support/captured_log.h"
#include "nccl/device_call.h"

namespace torchft_ext {
namespace {

using Values = std::vector<float>;

NcclEngineOptions blocking() {
  NcclEngineOptions options;
  options.blocking_calls = true;
  return options;
}

// 10 values on all, of a shape that NCCL has connected afterwards.
void sumOnAll(Cluster& cluster) {
  cluster.onAll([&](int i) {
    const FailurePtr failure =
        finish(cluster.group(i).issue(deviceAllreduce(floats(i, Values(10, 1)))));
    EXPECT_EQ(failure, nullptr) << failure->describe();
  });
}

int callThreads() {
  const auto running = threadSnapshot().running;
  return static_cast<int>(std::count(running.begin(), running.end(), "ft-nccl-call"));
}

class NcclBlockingTest : public NcclTest {
 protected:
  // Rank 0 issues an operation that NCCL does not get through with. What it returned.
  static std::thread issueInVain(Cluster& cluster, size_t count, std::atomic<bool>& returned) {
    return std::thread([&cluster, count, &returned] {
      const auto state = cluster.group(0).issue(deviceAllreduce(floats(0, Values(count, 1))));
      EXPECT_NE(finish(state), nullptr);
      returned = true;
    });
  }
};

TEST_F(NcclBlockingTest, WhatMayHaveToConnectIsCalledBesideAndWhatIsKnownHere) {
  NcclCluster cluster(2, blocking());
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  inject("in_progress allreduce rank=0 polls=-1");
  std::atomic<bool> returned{false};
  std::thread known = issueInVain(cluster, 10, returned);
  EXPECT_TRUE(waitFor([&] { return counted("allreduce") == 3; }));
  EXPECT_TRUE(waitFor([] { return callThreads() == 0; }));
  cluster.group(1).abort("it waits here");
  known.join();

  cluster.form(cluster.all(), "b");
  sumOnAll(cluster);
  inject("in_progress allreduce rank=0 polls=-1");
  std::thread unknown = issueInVain(cluster, 1000, returned);
  EXPECT_TRUE(waitFor([] { return callThreads() == 1; }));
  cluster.group(1).abort("it waits beside");
  unknown.join();
  EXPECT_TRUE(waitFor([] { return callThreads() == 0; }));
}

// Splits that change with each step are one shape; only who sends to whom is another.
TEST_F(NcclBlockingTest, MessagesOfAnySizeAreOneShape) {
  const auto comm = std::make_shared<DeviceComm>(DeviceCommSetup{
      sim::platform(), std::make_shared<Lifecycle>(GenerationIdentity{}), deviceOf(0), 0, 2, "c"});
  const auto shape = [&](OpKind kind, size_t first, size_t second) {
    Operation operation;
    operation.kind = kind;
    operation.inputs = {{nullptr, first}, {nullptr, second}};
    return shapeOf({{std::make_shared<const Operation>(operation), false, comm, nullptr, nullptr}},
                   *comm);
  };
  EXPECT_EQ(shape(OpKind::kAlltoall, 4, 4096), shape(OpKind::kAlltoall, 1 << 20, 40));
  EXPECT_NE(shape(OpKind::kAlltoall, 4, 4096), shape(OpKind::kAlltoall, 4, 0));
  EXPECT_NE(shape(OpKind::kAlltoall, 4, 4096), shape(OpKind::kGather, 4, 4096));
  EXPECT_NE(shape(OpKind::kAllgather, 4, 4), shape(OpKind::kAllgather, 4, 4096));
}

TEST_F(NcclBlockingTest, ABatchWithAnUnknownShapeIsCalledBesideAsAWhole) {
  NcclCluster cluster(2, blocking());
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  inject("in_progress allreduce rank=0 polls=-1");
  std::thread issuing([&] {
    for (const auto& state :
         cluster.group(0).issueTogether({deviceAllreduce(floats(0, Values(10, 1))),
                                         deviceAllreduce(floats(0, Values(1000, 1)))}))
      EXPECT_NE(finish(state), nullptr);
  });
  EXPECT_TRUE(waitFor([] { return !sim::Faults::instance().armed("allreduce"); }));
  EXPECT_EQ(callThreads(), 1);
  cluster.group(1).abort("it waits beside");
  issuing.join();
  cluster.form(cluster.all(), "b");
  sumOnAll(cluster);
}

TEST(KnownShapesTest, OfTooManyShapesTheLatestIsKnown) {
  KnownShapes shapes;
  constexpr uint64_t kMany = 3000;
  uint64_t known = 0;
  for (uint64_t shape = 0; shape < kMany; ++shape) {
    shapes.add(shape);
    EXPECT_TRUE(shapes.holds(shape));
    EXPECT_TRUE(shape == 0 || shapes.holds(shape - 1));
  }
  for (uint64_t shape = 0; shape < kMany; ++shape) known += shapes.holds(shape) ? 1 : 0;
  EXPECT_EQ(known, KnownShapes::kMost);
}

// The flags are raised while the call is inside, and it is freed when that has returned: the
// simulator counts the opposite as a violation.
TEST_F(NcclBlockingTest, ACallInsideIsToldToStopAtOnceAndFreedWhenItHasReturned) {
  NcclCluster cluster(2, blocking());
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  inject("block group_end");  // no flag ends that
  std::atomic<bool> returned{false};
  std::thread issuing = issueInVain(cluster, 10, returned);
  EXPECT_TRUE(waitFor([] { return !sim::Faults::instance().armed("group_end"); }));
  cluster.group(1).abort("one is inside");
  EXPECT_TRUE(waitFor([&] { return counted("aborts") == 2; }));
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators == 1; }));
  EXPECT_FALSE(returned);
  inject("clear");
  issuing.join();
}

// Beside, nothing holds up the issuing thread beyond the generation's end, not even NCCL.
TEST_F(NcclBlockingTest, AFirstCallThatNeverReturnsLetsItsIssuerGo) {
  allow_stuck = true;
  setAbortLimitForTest(milliseconds(300));
  EXPECT_TRUE(stopNcclEngines(testDeadline()));  // the limit is that of threads made later
  NcclCluster cluster(2, blocking());
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  const CapturedLog log;
  inject("block group_end");
  std::atomic<bool> returned{false};
  std::thread issuing = issueInVain(cluster, 1000, returned);
  EXPECT_TRUE(waitFor([] { return !sim::Faults::instance().armed("group_end"); }));
  cluster.group(1).abort("NCCL does not come back");
  EXPECT_TRUE(waitFor([&] { return CapturedLog::contains("a call into NCCL does not return"); }));
  issuing.join();  // with NCCL still in its call
  EXPECT_TRUE(waitFor([] { return sharedNcclThreads()->reaper.counts().stuck == 1; }));
  EXPECT_EQ(sim::ncclSnapshot().communicators, 1);
  cluster.form(cluster.all(), "b");
  sumOnAll(cluster);
  inject("clear");
  EXPECT_TRUE(waitFor([] { return callThreads() == 0; }));
  // It is left as it is: its group is that of a thread which has ended.
  EXPECT_EQ(sim::ncclSnapshot().communicators, 3);
  cluster.group(0).abort("the end of the test");
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators == 1; }));
  sim::forgetCommunicators();
  setAbortLimitForTest(std::chrono::seconds(10));
}

// A member that is slower than the limit of a goodbye: what waits for it there is aborted.
TEST_F(NcclBlockingTest, AFinalizeThatTakesTooLongIsAborted) {
  NcclCluster cluster(2, blocking());
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  inject("in_progress finalize rank=0 polls=-1");
  std::thread slow([&] { cluster.group(0).shutdown(Deadline::after(milliseconds(200))); });
  cluster.group(1).shutdown(testDeadline());
  slow.join();
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators == 0; }));
  EXPECT_EQ(counted("destroys"), 1);
  EXPECT_EQ(counted("aborts"), 1);
}

// Where the goodbye's limit is beyond the reaper's own, there is still time to abort.
TEST_F(NcclBlockingTest, AFinalizeThatOutlastsTheReapersLimitIsAbortedWithinIt) {
  setAbortLimitForTest(milliseconds(600));
  EXPECT_TRUE(stopNcclEngines(testDeadline()));
  NcclCluster cluster(1, blocking());
  cluster.form({0}, "a");
  sumOnAll(cluster);
  const CapturedLog log;
  inject("in_progress finalize polls=-1");
  cluster.group(0).shutdown(testDeadline());
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators == 0; }));
  EXPECT_FALSE(CapturedLog::contains("does not return"));
  EXPECT_EQ(sharedNcclThreads()->reaper.counts().stuck, 0);
  setAbortLimitForTest(std::chrono::seconds(10));
}

// An operation that another thread has issued since holds up neither goodbye nor communicators.
TEST_F(NcclBlockingTest, AGoodbyeBesideACallThatIsInsideEndsThatCall) {
  NcclCluster cluster(2, blocking());
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  inject("in_progress allreduce rank=0 polls=-1");
  std::atomic<bool> returned{false};
  std::thread issuing = issueInVain(cluster, 1000, returned);
  EXPECT_TRUE(waitFor([] { return callThreads() == 1; }));
  cluster.group(0).shutdown(Deadline::after(milliseconds(100)));
  issuing.join();
  EXPECT_TRUE(waitFor([] { return callThreads() == 0; }));
}

TEST_F(NcclBlockingTest, AnInitThatWaitsForOthersIsEndedByAnAbort) {
  NcclCluster cluster(2, blocking());
  cluster.form(cluster.all(), "a");
  inject("block init rank=1");  // before it has a handle
  std::vector<std::thread> issuing;
  for (int i = 0; i < 2; ++i) {
    issuing.emplace_back([&cluster, i] {
      const auto state = cluster.group(i).issue(deviceAllreduce(floats(i, Values(10, 1))));
      EXPECT_NE(finish(state), nullptr);
    });
  }
  EXPECT_TRUE(
      waitFor([] { return counted("inits") == 1 && !sim::Faults::instance().armed("init"); }));
  cluster.group(0).abort("the other one does not come");
  for (auto& thread : issuing) thread.join();  // rank 1's own call is still in NCCL
  EXPECT_TRUE(waitFor([] { return callThreads() == 1; }));
  inject("clear");
  EXPECT_TRUE(waitFor([] { return callThreads() == 0 && sim::ncclSnapshot().roots == 0; }));
  cluster.form(cluster.all(), "b");
  sumOnAll(cluster);
}

TEST_F(NcclBlockingTest,
       ASignalWhileACallIsBesideEndsTheGenerationAndKeepsTheBuffersUntilNcclIsThrough) {
  NcclCluster cluster(2, blocking());
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  Floats values = floats(0, Values(1000, 1));
  const std::weak_ptr<DeviceArray<float>> watched = values;
  Operation operation = deviceAllreduce(values);
  values.reset();
  inject("block group_end");  // which no flag ends
  {
    const ThrowingHook signal;
    EXPECT_THROW(cluster.group(0).issue(std::move(operation)), Interrupted);
  }
  EXPECT_NE(cluster.group(0).errored(), nullptr);
  EXPECT_EQ(callThreads(), 1);
  EXPECT_FALSE(watched.expired());
  inject("clear");
  EXPECT_TRUE(waitFor([&] { return watched.expired(); }));
}

// The one of all ranks and the one of two: whichever does not come back is left as it is.
TEST_F(NcclBlockingTest, AFinalizeThatNeverReturnsHoldsUpNoOther) {
  allow_stuck = true;
  setAbortLimitForTest(milliseconds(300));
  EXPECT_TRUE(stopNcclEngines(testDeadline()));
  NcclCluster cluster(2, blocking());
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  cluster.onAll([&](int i) {
    const Floats values = floats(i, {1});
    EXPECT_EQ(
        finish(cluster.group(i).issue(i == 0 ? deviceSend(values, 1) : deviceRecv(values, 0))),
        nullptr);
  });
  EXPECT_EQ(sim::ncclSnapshot().communicators, 4);
  inject("block finalize rank=0");
  cluster.group(0).shutdown(Deadline::after(milliseconds(400)));
  EXPECT_TRUE(waitFor([] { return sharedNcclThreads()->reaper.counts().stuck == 1; }));
  EXPECT_EQ(sharedNcclThreads()->reaper.counts().retired, 1);
  inject("clear");
  EXPECT_TRUE(waitFor([] { return callThreads() == 0; }));
  cluster.group(1).abort("the end of the test");
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators == 1; }));
  sim::forgetCommunicators();
  setAbortLimitForTest(std::chrono::seconds(10));
}

TEST_F(NcclBlockingTest, MembersNeedNotDoItAlike) {
  const auto made = std::make_shared<int>(0);
  Cluster cluster(2, loopbackOptions(), [made](std::shared_ptr<Engine> host) {
    NcclEngineOptions options;
    options.blocking_calls = (*made)++ == 0;
    return makeNcclEngine(sim::platform(), std::move(host), options);
  });
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  EXPECT_EQ(counted("inits"), 2);
  EXPECT_EQ(counted("blocking inits"), 1);
}

TEST_F(NcclBlockingTest, AnOlderLibraryGetsNonBlockingOnes) {
  inject("version 22202");
  const CapturedLog log;
  NcclCluster cluster(1, blocking());
  EXPECT_TRUE(waitFor([] { return CapturedLog::contains("communicators are non-blocking"); }));
  cluster.form({0}, "a");
  sumOnAll(cluster);
  EXPECT_EQ(counted("inits"), 1);
  EXPECT_EQ(counted("blocking inits"), 0);
}

}  // namespace
}  // namespace torchft_ext
