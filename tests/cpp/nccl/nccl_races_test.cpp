// What must not meet: ids and the user's own messages, aborts and calls, failures and buffers,
// goodbyes and operations, captures and operations. Over the NCCL engine and the simulator.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpp/nccl/nccl_cluster.h"
#include "nccl/bootstrap.h"

namespace torchft_ext {
namespace {

using Values = std::vector<float>;

void succeed(const std::shared_ptr<OpState>& state) {
  const FailurePtr failure = finish(state);
  ASSERT_EQ(failure, nullptr) << failure->describe();
}

class NcclRacesTest : public NcclTest {
 protected:
  static void sum(Cluster& cluster, int i) {
    const Floats values = floats(i, Values(10, 1));
    succeed(cluster.group(i).issue(deviceAllreduce(values)));
    EXPECT_EQ(values->read(), Values(10, static_cast<float>(cluster.group(i).size())));
  }
  static void sumOnAll(Cluster& cluster) {
    cluster.onAll([&](int i) { sum(cluster, i); });
  }
};

// ---- ids

using Bytes = std::shared_ptr<std::vector<uint8_t>>;

// Of the size of an id's message, in case anything still matches by size.
Operation hostBroadcast(const Bytes& bytes) {
  Operation operation;
  operation.kind = OpKind::kBroadcast;
  operation.outputs = {{bytes->data(), bytes->size()}};
  operation.keep_alive = bytes;
  return operation;
}

// Another thread's collective on host memory comes before the id on one rank, after it on others.
TEST_F(NcclRacesTest, IdsStayOutOfTheUsersOwnCollectives) {
  for (const int late : {0, 1, 2}) {
    NcclCluster cluster(3);
    cluster.form(cluster.all(), "a");
    cluster.onAll([&](int i) {
      const auto bytes = std::make_shared<std::vector<uint8_t>>(160, i == 0 ? 42 : 0);
      if (i == late) sum(cluster, i);
      const auto host = cluster.group(i).issue(hostBroadcast(bytes));
      if (i != late) sum(cluster, i);
      succeed(host);
      EXPECT_EQ(*bytes, std::vector<uint8_t>(160, 42));
    });
  }
}

TEST_F(NcclRacesTest, TransfersOfIdsAreNoSuccessesOfTheUser) {
  NcclCluster cluster(3);
  const auto successes = std::make_shared<SuccessCount>(0);
  for (const int i : cluster.all()) cluster.group(i).setJob(JobMembership::following(successes));
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  EXPECT_EQ(successes->load(), 3U);
}

TEST_F(NcclRacesTest, IdsStayOutOfAReceiveFromAnyRank) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  const auto bytes = std::make_shared<std::vector<uint8_t>>(160, 0);
  Operation any;
  any.kind = OpKind::kRecv;
  any.outputs = {{bytes->data(), bytes->size()}};
  any.keep_alive = bytes;
  const auto received = cluster.group(1).issue(std::move(any));
  sumOnAll(cluster);
  EXPECT_FALSE(received->done());
  const auto sent_bytes = std::make_shared<std::vector<uint8_t>>(160, 7);
  Operation send;
  send.kind = OpKind::kSend;
  send.peer = 1;
  send.inputs = {{sent_bytes->data(), sent_bytes->size()}};
  send.keep_alive = sent_bytes;
  succeed(cluster.group(0).issue(std::move(send)));
  succeed(received);
  EXPECT_EQ(*bytes, *sent_bytes);
}

// ---- issuers

TEST_F(NcclRacesTest, AMessageThatWaitsForItsPeerHoldsUpNoOperationOfTheHost) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  std::thread receiving([&] {  // rank 1 comes to it after the broadcast that is next
    const Floats values = floats(0, Values(10, 0));
    succeed(cluster.group(0).issue(deviceRecv(values, 1)));
    EXPECT_EQ(values->read(), Values(10, 5));
  });
  EXPECT_TRUE(waitFor([&] { return cluster.group(0).stats().operations == 1; }));
  cluster.onAll([&](int i) {
    const auto bytes = std::make_shared<std::vector<uint8_t>>(160, i == 0 ? 42 : 0);
    succeed(cluster.group(i).issue(hostBroadcast(bytes)));
    if (i == 1) succeed(cluster.group(1).issue(deviceSend(floats(1, Values(10, 5)), 0)));
  });
  receiving.join();
}

// The turn to issue alone keeps them apart: no lock is held over NCCL's calls.
TEST_F(NcclRacesTest, ThreadsThatIssueAtOnceMakeOneCommunicator) {
  constexpr int kGenerations = 10;
  NcclCluster cluster(1);
  for (int generation = 1; generation <= kGenerations; ++generation) {
    cluster.form(cluster.all(), std::to_string(generation));
    std::vector<std::thread> issuing;
    std::atomic<bool> go{false};
    for (int i = 0; i < 4; ++i) {
      issuing.emplace_back([&] {
        while (!go) std::this_thread::yield();
        sum(cluster, 0);
      });
    }
    go = true;
    for (std::thread& each : issuing) each.join();
    EXPECT_EQ(counted("inits"), generation);
  }
}

TEST_F(NcclRacesTest, WhoWaitsToIssueHasALimit) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  std::thread receiving([&] {
    EXPECT_NE(finish(cluster.group(0).issue(deviceRecv(floats(0, Values(10, 0)), 1))), nullptr);
  });
  EXPECT_TRUE(waitFor([&] { return cluster.group(0).stats().operations == 1; }));
  Operation second = deviceAllreduce(floats(0, Values(10, 0)));
  second.timeout = milliseconds(50);
  const FailurePtr failure = finish(cluster.group(0).issue(std::move(second)));
  receiving.join();
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kTimeout) << failure->describe();
}

TEST(NcclBootstrap, TheTreeReachesEveryRankOnceAndAgrees) {
  for (int size = 1; size <= 33; ++size) {
    std::vector<int> parents(static_cast<size_t>(size), -1);
    for (int rank = 0; rank < size; ++rank)
      for (const int child : placeInTree(rank, size).children) {
        ASSERT_GT(child, rank);
        ASSERT_LT(child, size);
        EXPECT_EQ(parents[static_cast<size_t>(child)], -1);
        parents[static_cast<size_t>(child)] = rank;
      }
    for (int rank = 0; rank < size; ++rank)
      EXPECT_EQ(placeInTree(rank, size).parent, parents[static_cast<size_t>(rank)]);
  }
}

TEST(NcclBootstrap, PartsAreAsEqualAsCanBeAndEachHasAFirstRank) {
  for (int size = 1; size <= 300; ++size) {
    const int roots = rootsFor(size, 128);
    EXPECT_EQ(roots, size <= 128 ? 1 : size <= 256 ? 2 : 3);
    int made = 0;
    for (int rank = 0; rank < size; ++rank) made += makesId(rank, size, roots) ? 1 : 0;
    EXPECT_EQ(made, roots);
    EXPECT_EQ(firstRankOfPart(0, size, roots), 0);
    for (int part = 0; part < roots; ++part) {
      const int after = part + 1 == roots ? size : firstRankOfPart(part + 1, size, roots);
      const int ranks = after - firstRankOfPart(part, size, roots);
      EXPECT_GE(ranks, size / roots);
      EXPECT_LE(ranks, (size + roots - 1) / roots);
    }
  }
}

NcclEngineOptions partsOfTwo() {
  NcclEngineOptions options;
  options.ranks_per_root = 2;
  return options;
}

TEST_F(NcclRacesTest, LargeWorldsGetAnIdForEachPart) {
  NcclCluster cluster(5, partsOfTwo());
  cluster.form(cluster.all(), "parts");
  sumOnAll(cluster);
  EXPECT_EQ(counted("unique_ids"), 3);
  cluster.form({4, 0, 2}, "fewer");
  Cluster::on({4, 0, 2}, [&](int i) { sum(cluster, i); });
  EXPECT_EQ(counted("unique_ids"), 5);
}

TEST_F(NcclRacesTest, AnOlderLibraryGetsOneIdHoweverLargeTheWorld) {
  inject("version 22200");
  NcclCluster cluster(5, partsOfTwo());
  cluster.form(cluster.all(), "one");
  sumOnAll(cluster);
  EXPECT_EQ(counted("unique_ids"), 1);
}

// What waits in NCCL for ranks hears of no abort: so nothing is made there before all have come.
TEST_F(NcclRacesTest, NothingIsMadeInNcclWhereARankDoesNotCome) {
  NcclCluster cluster(5);
  cluster.form(cluster.all(), "a");
  const auto heard = [&cluster] { return cluster.group(0).stats().bytes_received; };
  const uint64_t before = heard();
  std::vector<std::thread> issuing;
  for (const int i : {0, 1, 2, 4}) {
    issuing.emplace_back([&cluster, i] {
      EXPECT_NE(finish(cluster.group(i).issue(deviceAllreduce(floats(i, Values(10, 1))))), nullptr);
    });
  }
  EXPECT_TRUE(waitFor([&] { return heard() > before; }));
  cluster.group(3).abort("it does not come");
  for (auto& thread : issuing) thread.join();
  EXPECT_EQ(counted("unique_ids"), 0);
  EXPECT_EQ(counted("inits"), 0);
}

TEST_F(NcclRacesTest, EveryPartsRootIsReleasedWhereARankFailsOnItsWayIn) {
  inject("fail init rank=3 code=2");
  NcclCluster cluster(5, partsOfTwo());
  cluster.form(cluster.all(), "parts");
  std::vector<std::thread> issuing;
  for (const int i : cluster.all()) {
    issuing.emplace_back([&cluster, i] {
      EXPECT_NE(finish(cluster.group(i).issue(deviceAllreduce(floats(i, Values(10, 1))))), nullptr);
    });
  }
  for (auto& thread : issuing) thread.join();
  EXPECT_EQ(counted("unique_ids"), 3);
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().roots == 0; }));
}

// ---- aborts

// The simulator says so where a group ends with a call on a communicator aborted meanwhile, or
// freed. A blocking one is told to stop at once.
TEST_F(NcclRacesTest, AnAbortWaitsForTheEndOfAGroupOfCalls) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  inject("block allreduce rank=0");  // between the group's start and its end
  std::thread issuing([&] {
    const auto state = cluster.group(0).issue(deviceAllreduce(floats(0, Values(10, 1))));
    EXPECT_NE(finish(state), nullptr);
  });
  EXPECT_TRUE(waitFor([&] { return !sim::Faults::instance().armed("allreduce"); }));
  cluster.group(1).abort("in the middle of a group");
  // Its waiters are released, and it is not aborted before the call has come back.
  EXPECT_TRUE(waitFor([&] { return counted("aborts") == (blockingCalls() ? 2 : 1); }));
  EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators == 1; }));
  inject("clear");
  issuing.join();
  EXPECT_TRUE(waitFor([&] { return counted("aborts") == 2; }));
}

// ---- buffers

// One of two goes wrong on its way behind the calls: the other is in the poller's hands already.
TEST_F(NcclRacesTest, AThrowBehindTheSecondOfTwoCallsFailsBothAndKeepsTheBuffers) {
  NcclCluster cluster(1);
  cluster.form({0}, "a");
  sum(cluster, 0);
  Floats values = floats(0, Values(10, 1));
  const std::weak_ptr<DeviceArray<float>> watched = values;
  Operation first = deviceAllreduce(floats(0, Values(10, 1)));
  Operation second = deviceAllreduce(values);
  values.reset();
  sideOf(second).behind = [](const c10::Stream&) { throw std::runtime_error("behind"); };
  inject("hang allreduce");
  EXPECT_THROW(cluster.group(0).issueTogether({std::move(first), std::move(second)}),
               std::runtime_error);
  EXPECT_NE(cluster.group(0).errored(), nullptr);
  EXPECT_TRUE(waitFor([&] { return watched.expired(); }));  // freed only after the abort
  EXPECT_TRUE(waitFor([] { return sharedNcclThreads()->poller->counts().watched == 0; }));
}

// NCCL launches from a thread of its own: an event recorded before it was through proves nothing.
TEST_F(NcclRacesTest, BuffersOfAnInterruptedCallAreKeptUntilNcclIsThroughWithThem) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  Floats values = floats(0, Values(10, 1));
  const std::weak_ptr<DeviceArray<float>> watched = values;
  inject("in_progress allreduce rank=0 polls=1000000000");
  std::thread aborting([&] {
    EXPECT_TRUE(waitFor([&] { return counted("allreduce") == 3; }));
    inject("block group_end count=2");  // which frees what was aborted, for each rank
    cluster.group(1).abort("while NCCL is at work");
  });
  Operation operation = deviceAllreduce(values);
  values.reset();
  const auto state = cluster.group(0).issue(std::move(operation));
  EXPECT_NE(finish(state), nullptr);
  aborting.join();
  EXPECT_TRUE(waitFor([] { return sharedNcclThreads()->poller->counts().draining == 1; }));
  EXPECT_FALSE(watched.expired());
  inject("clear");
  EXPECT_TRUE(waitFor([&] { return watched.expired(); }));
}

// ---- goodbyes

TEST_F(NcclRacesTest, WhatStillNeedsALeaverFailsSoonAfterItsGoodbye) {
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "a");
  sumOnAll(cluster);
  const auto state = cluster.group(0).issue(deviceAllreduce(floats(0, Values(10, 1))));
  ASSERT_TRUE(cluster.group(1).shutdown(testDeadline()));
  const FailurePtr failure = finish(state);
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kPeerLeft) << failure->describe();
  EXPECT_EQ(failure->cause.rank, 1);
}

TEST_F(NcclRacesTest, AMessageAmongOthersOutlivesAGoodbye) {
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "a");
  const Floats in = floats(0, {0});
  std::thread receiving([&] { succeed(cluster.group(0).issue(deviceRecv(in, 2))); });
  ASSERT_TRUE(cluster.group(1).shutdown(testDeadline()));
  std::this_thread::sleep_for(kLeaverGrace + milliseconds(200));  // the claim is about this time
  const Floats out = floats(2, {5});
  succeed(cluster.group(2).issue(deviceSend(out, 0)));
  receiving.join();
  EXPECT_EQ(in->read(), Values({5}));
}

TEST_F(NcclRacesTest, AnInitialisationThatNeedsALeaverEndsSoonAfterItsGoodbye) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "a");
  std::thread leaving([&] {
    EXPECT_TRUE(waitFor([&] { return cluster.group(0).stats().operations == 1; }));
    cluster.group(1).shutdown(testDeadline());
  });
  const FailurePtr failure =
      finish(cluster.group(0).issue(deviceAllreduce(floats(0, Values(10, 1)))));
  leaving.join();
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kPeerLeft) << failure->describe();
}

// A thread that has named no device speaks to the first one, and would make a context there.
TEST_F(NcclRacesTest, DevicesOfOthersAreLeftAlone) {
  NcclCluster cluster(2);
  cluster.form({1}, "alone");
  sum(cluster, 0 + 1);
  EXPECT_TRUE(waitFor([] { return counted("relaxed on 1") > 0; }));
  cluster.group(1).abort("enough");
  EXPECT_TRUE(waitFor([] { return counted("aborts") == 1; }));
  for (const char* what : {"relaxed", "queried", "recorded", "blocked", "asked for a capture"})
    EXPECT_EQ(counted(std::string(what) + " on 0"), 0) << what;
  EXPECT_GT(counted("recorded on 1"), 0);
}

// ---- captures

TEST_F(NcclRacesTest, OutsideACaptureThatHasTheGroupsOperationsOthersAreRefused) {
  NcclCluster cluster(1);
  cluster.form({0}, "a");
  sum(cluster, 0);
  const c10::Stream captured = anotherOn(deviceOf(0));
  auto graph = sim::streamOf(captured).beginCapture();
  Operation inside = deviceAllreduce(floats(0, Values(10, 1)));
  const auto keep_alive = inside.keep_alive;
  const auto side = std::make_shared<StreamSide>(captured);
  inside.device = side;
  succeed(cluster.group(0).issue(std::move(inside)));
  EXPECT_TRUE(side->captured);
  EXPECT_THROW(cluster.group(0).issue(deviceAllreduce(floats(0, Values(10, 1)))),
               std::invalid_argument);
  side->end->block(captured);
  EXPECT_TRUE(sim::streamOf(captured).endCapture());
  sum(cluster, 0);  // the generation is unharmed
  cluster.group(0).abort("with a live graph");
  EXPECT_TRUE(waitFor([&] { return counted("aborts") == 1; }));
  EXPECT_EQ(sim::ncclSnapshot().communicators, 1);
  graph.reset();
}

}  // namespace
}  // namespace torchft_ext
