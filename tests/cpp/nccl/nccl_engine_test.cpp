// Groups on device memory, over the NCCL engine and the simulator: results, generations, streams.
#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "cpp/comm/around_engine.h"
#include "cpp/nccl/nccl_cluster.h"
#include "nccl/nccl_communicator.h"

namespace torchft_ext {
namespace {

using Values = std::vector<float>;

// What rank contributes at position i.
float valueOf(int rank, size_t i) {
  return static_cast<float>(rank + 1) * 10 + static_cast<float>(i);
}
Values valuesOf(int rank, size_t count) {
  Values values;
  for (size_t i = 0; i < count; ++i) values.push_back(valueOf(rank, i));
  return values;
}
Values sumOf(int size, size_t count) {
  Values sum(count);
  for (int rank = 0; rank < size; ++rank)
    for (size_t i = 0; i < count; ++i) sum[i] += valueOf(rank, i);
  return sum;
}

void succeed(const std::shared_ptr<OpState>& state) {
  const FailurePtr failure = finish(state);
  ASSERT_EQ(failure, nullptr) << failure->describe();
}

void expectSum(Cluster& cluster, const std::vector<int>& which) {
  Cluster::on(which, [&](int i) {
    const int rank = cluster.group(i).rank();
    const Floats values = floats(i, valuesOf(rank, 100));
    succeed(cluster.group(i).issue(deviceAllreduce(values)));
    EXPECT_EQ(values->read(), sumOf(static_cast<int>(which.size()), 100));
  });
}

class NcclEngineTest : public NcclTest {};

// One operation of every rank, and what it must leave in `out`.
struct Case {
  Operation operation;
  Floats out;
  Values expected;
};
using MakeCase = std::function<Case(int rank, int size)>;

void expectEverywhere(const MakeCase& make) {
  for (int size = 1; size <= 4; ++size) {
    NcclCluster cluster(size);
    cluster.form(cluster.all(), "case");
    cluster.onAll([&](int rank) {
      for (int round = 0; round < 2; ++round) {
        Case one = make(rank, size);
        succeed(cluster.group(rank).issue(std::move(one.operation)));
        EXPECT_EQ(one.out->read(), one.expected) << "rank " << rank << " of " << size;
      }
    });
  }
}

TEST_F(NcclEngineTest, Allreduce) {
  expectEverywhere([](int rank, int size) {
    const Floats values = floats(rank, valuesOf(rank, 7));
    return Case{deviceAllreduce(values), values, sumOf(size, 7)};
  });
}

// The slower ones are still at the sum that the faster ones have, on the device or on the host.
TEST_F(NcclEngineTest, ConfigureLeavesTheLastOperationToTheSlowerMembers) {
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "first");
  std::array<FailurePtr, 3> failed;
  cluster.onAll([&](int i) {
    auto& first = failed[static_cast<size_t>(i)];
    for (int generation = 0; generation < 20 && !first; ++generation) {
      const Floats values = floats(i, valuesOf(i, 1000));
      first = finish(cluster.group(i).issue(deviceAllreduce(values)));
      if (first) break;
      EXPECT_EQ(values->read(), sumOf(3, 1000));
      std::vector<float> on_host(50'000, 1.0F);
      if (generation % 2 == 0) first = finish(cluster.group(i).issue(allreduceOf(on_host)));
      if (first) break;
      first = cluster.members[static_cast<size_t>(i)]->configure(std::to_string(generation), i, 3);
    }
  });
  for (const FailurePtr& failure : failed) EXPECT_EQ(failure, nullptr) << failure->describe();
}

TEST_F(NcclEngineTest, WhoStillNeedsTheGenerationThatAnotherEndsIsToldSo) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "first");
  expectSum(cluster, cluster.all());
  std::thread other([&] { cluster.members[1]->configure("second", 1, 2); });
  const Floats values = floats(0, {1});
  const FailurePtr failure = finish(cluster.group(0).issue(deviceAllreduce(values)));
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kAborted) << failure->describe();
  EXPECT_EQ(failure->cause.rank, 1);
  EXPECT_EQ(failure->cause.how, "it began another generation");
  EXPECT_EQ(cluster.members[0]->configure("second", 0, 2), nullptr);
  other.join();
}

TEST_F(NcclEngineTest, Average) {
  expectEverywhere([](int rank, int size) {
    const Floats values = floats(rank, Values(3, static_cast<float>(2 * rank)));
    return Case{deviceAllreduce(values, ReduceKind::kAvg), values,
                Values(3, static_cast<float>(size - 1))};
  });
}

TEST_F(NcclEngineTest, Broadcast) {
  expectEverywhere([](int rank, int size) {
    const Floats values = floats(rank, valuesOf(rank, 5));
    Operation operation;
    operation.kind = OpKind::kBroadcast;
    operation.root = size - 1;
    operation.outputs = {values->all()};
    return Case{onDevice(operation, {values}, values->device()), values, valuesOf(size - 1, 5)};
  });
}

// Rank r's part has `base + grow * r` elements.
Case allgatherCase(int rank, int size, size_t base, size_t grow, bool flat) {
  const auto count = [&](int r) { return base + grow * static_cast<size_t>(r); };
  Values expected;
  for (int r = 0; r < size; ++r)
    for (float value : valuesOf(r, count(r))) expected.push_back(value);
  const Floats in = floats(rank, valuesOf(rank, count(rank)));
  const Floats out = floats(rank, Values(expected.size(), -1));
  Operation operation;
  operation.kind = OpKind::kAllgather;
  operation.inputs = {in->all()};
  size_t at = 0;
  for (int r = 0; r < size; at += count(r), ++r)
    operation.outputs.push_back(out->part(at, count(r)));
  operation = onDevice(operation, {in, out}, in->device());
  sideOf(operation).flat = flat;
  return {operation, out, expected};
}

TEST_F(NcclEngineTest, AllgatherIntoOnePiece) {
  expectEverywhere([](int rank, int size) { return allgatherCase(rank, size, 4, 0, true); });
}
TEST_F(NcclEngineTest, AllgatherIntoAList) {
  expectEverywhere([](int rank, int size) { return allgatherCase(rank, size, 4, 0, false); });
}
TEST_F(NcclEngineTest, AllgatherOfUnevenParts) {
  expectEverywhere([](int rank, int size) { return allgatherCase(rank, size, 0, 3, true); });
}

Case reduceScatterCase(int rank, int size, size_t grow, bool flat) {
  const auto count = [&](int r) { return 4 + grow * static_cast<size_t>(r); };
  size_t total = 0;
  for (int r = 0; r < size; ++r) total += count(r);
  const Floats in = floats(rank, valuesOf(rank, total));
  const Floats out = floats(rank, Values(count(rank), -1));
  Operation operation;
  operation.kind = OpKind::kReduceScatter;
  operation.outputs = {out->all()};
  size_t at = 0;
  Values expected;
  for (int r = 0; r < size; at += count(r), ++r) {
    operation.inputs.push_back(in->part(at, count(r)));
    const Values sum = sumOf(size, total);
    if (r == rank)
      expected.assign(sum.begin() + static_cast<long>(at),
                      sum.begin() + static_cast<long>(at + count(r)));
  }
  operation = onDevice(operation, {in, out}, in->device());
  sideOf(operation).flat = flat;
  return {operation, out, expected};
}

TEST_F(NcclEngineTest, ReduceScatterFromOnePiece) {
  expectEverywhere([](int rank, int size) { return reduceScatterCase(rank, size, 0, true); });
}
TEST_F(NcclEngineTest, ReduceScatterFromAListOfUnevenParts) {
  expectEverywhere([](int rank, int size) { return reduceScatterCase(rank, size, 2, false); });
}

TEST_F(NcclEngineTest, Reduce) {
  expectEverywhere([](int rank, int size) {
    const Floats values = floats(rank, valuesOf(rank, 3));
    Operation operation;
    operation.kind = OpKind::kReduce;
    operation.root = size - 1;
    operation.inputs = {values->all()};
    if (rank == size - 1) operation.outputs = {values->all()};
    return Case{onDevice(operation, {values}, values->device()), values,
                rank == size - 1 ? sumOf(size, 3) : valuesOf(rank, 3)};
  });
}

TEST_F(NcclEngineTest, Gather) {
  expectEverywhere([](int rank, int size) {
    const Floats in = floats(rank, valuesOf(rank, 2));
    const auto total = static_cast<size_t>(rank == 0 ? 2 * size : 0);
    const Floats out = floats(rank, Values(total, -1));
    Operation operation;
    operation.kind = OpKind::kGather;
    operation.inputs = {in->all()};
    Values expected;
    for (int r = 0; r < size && rank == 0; ++r) {
      operation.outputs.push_back(out->part(static_cast<size_t>(2 * r), 2));
      for (float value : valuesOf(r, 2)) expected.push_back(value);
    }
    return Case{onDevice(operation, {in, out}, in->device()), out, expected};
  });
}

TEST_F(NcclEngineTest, Scatter) {
  expectEverywhere([](int rank, int size) {
    const Floats in = floats(rank, valuesOf(0, static_cast<size_t>(2 * size)));
    const Floats out = floats(rank, Values(2, -1));
    Operation operation;
    operation.kind = OpKind::kScatter;
    operation.outputs = {out->all()};
    for (int r = 0; r < size && rank == 0; ++r)
      operation.inputs.push_back(in->part(static_cast<size_t>(2 * r), 2));
    return Case{
        onDevice(operation, {in, out}, in->device()),
        out,
        {valueOf(0, static_cast<size_t>(2 * rank)), valueOf(0, static_cast<size_t>(2 * rank + 1))}};
  });
}

// Rank r sends to + 1 elements to each rank.
TEST_F(NcclEngineTest, AlltoallOfUnevenParts) {
  expectEverywhere([](int rank, int size) {
    const auto n = static_cast<size_t>(size);
    const auto own = static_cast<size_t>(rank) + 1;
    const Floats in = floats(rank, valuesOf(rank, n * (n + 1) / 2));
    const Floats out = floats(rank, Values(n * own, -1));
    Operation operation;
    operation.kind = OpKind::kAlltoall;
    Values expected;
    for (size_t other = 0, at = 0; other < n; at += other + 1, ++other) {
      operation.inputs.push_back(in->part(at, other + 1));
      operation.outputs.push_back(out->part(other * own, own));
      for (size_t i = 0; i < own; ++i)
        expected.push_back(valueOf(static_cast<int>(other), own * (own - 1) / 2 + i));
    }
    return Case{onDevice(operation, {in, out}, in->device()), out, expected};
  });
}

TEST_F(NcclEngineTest, BarrierEndsOnlyWhenAllHaveEntered) {
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "barrier");
  std::atomic<int> entered{0};
  cluster.onAll([&](int rank) {
    const auto barrier = [&] { return onDevice({}, {}, deviceOf(rank)); };
    ++entered;
    succeed(cluster.group(rank).issue(barrier()));
    EXPECT_EQ(entered.load(), 3);
    succeed(cluster.group(rank).issue(barrier()));
  });
}

// A ring, all sends and receives at once: initialised pair by pair in one order everywhere.
TEST_F(NcclEngineTest, ABatchOfMessagesAroundARing) {
  for (int size = 2; size <= 4; ++size) {
    NcclCluster cluster(size);
    cluster.form(cluster.all(), "ring");
    cluster.onAll([&](int rank) {
      const int next = (rank + 1) % size;
      const int previous = (rank + size - 1) % size;
      const Floats out = floats(rank, valuesOf(rank, 6));
      const Floats in = floats(rank, Values(6, -1));
      auto states =
          cluster.group(rank).issueTogether({deviceSend(out, next), deviceRecv(in, previous)});
      for (const auto& state : states) succeed(state);
      EXPECT_EQ(in->read(), valuesOf(previous, 6));
    });
  }
}

TEST_F(NcclEngineTest, OtherRanksAreNotNeededForAMessage) {
  NcclCluster cluster(3);
  cluster.form(cluster.all(), "pair");
  Cluster::on({0, 2}, [&](int rank) {
    const Floats values = floats(rank, valuesOf(rank, 4));
    succeed(cluster.group(rank).issue(rank == 0 ? deviceSend(values, 2) : deviceRecv(values, 0)));
    EXPECT_EQ(values->read(), valuesOf(0, 4));
  });
}

TEST_F(NcclEngineTest, CoalescedCollectivesBeginAsOne) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "together");
  cluster.onAll([&](int rank) {
    const Floats a = floats(rank, valuesOf(rank, 3));
    const Floats b = floats(rank, valuesOf(rank, 5));
    for (const auto& state :
         cluster.group(rank).issueTogether({deviceAllreduce(a), deviceAllreduce(b)}))
      succeed(state);
    EXPECT_EQ(a->read(), sumOf(2, 3));
    EXPECT_EQ(b->read(), sumOf(2, 5));
  });
}

TEST_F(NcclEngineTest, HostAndDeviceOperationsShareAGeneration) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "both");
  cluster.onAll([&](int rank) {
    Values host(4, static_cast<float>(rank));
    const Floats device = floats(rank, valuesOf(rank, 4));
    const auto first = cluster.group(rank).issue(allreduceOf(host));
    const auto second = cluster.group(rank).issue(deviceAllreduce(device));
    succeed(first);
    succeed(second);
    EXPECT_EQ(host, Values(4, 1.0F));
    EXPECT_EQ(device->read(), sumOf(2, 4));
  });
}

TEST_F(NcclEngineTest, SizesChangeThroughGenerations) {
  NcclCluster cluster(4);
  cluster.form({0, 1, 2, 3}, "a");
  expectSum(cluster, {0, 1, 2, 3});
  cluster.form({3, 1}, "b");
  expectSum(cluster, {3, 1});
  cluster.form({0, 1, 2}, "c");
  expectSum(cluster, {0, 1, 2});
}

TEST_F(NcclEngineTest, ABoundDeviceIsReadyWhenTheGenerationBegins) {
  auto data = std::make_shared<MemoryStore>();
  std::vector<std::unique_ptr<ClusterMember>> members;
  for (int i = 0; i < 2; ++i) {
    NcclEngineOptions options;
    options.bound_device = deviceOf(i);
    members.push_back(std::make_unique<ClusterMember>(
        std::to_string(i), data, loopbackOptions(), [options](std::shared_ptr<Engine> host) {
          return makeNcclEngine(sim::platform(), std::move(host), options);
        }));
  }
  Cluster::on({0, 1}, [&](int i) {
    EXPECT_EQ(members[static_cast<size_t>(i)]->configure("bound", i, 2), nullptr);
  });
  EXPECT_EQ(counted("inits"), 2);
  EXPECT_EQ(sim::ncclSnapshot().communicators, 2);
}

// ---- NCCL in progress, wherever it may be

TEST_F(NcclEngineTest, CallsInProgressAreWaitedFor) {
  NcclCluster cluster(3);
  inject("in_progress any count=-1 polls=5");
  inject("in_progress allreduce count=-1 polls=5");
  cluster.form(cluster.all(), "progress");
  for (int round = 0; round < 5; ++round) expectSum(cluster, cluster.all());
  cluster.group(0).abort("enough");
}

// ---- streams

TEST_F(NcclEngineTest, AnOperationWaitsForItsCallersStream) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "order");
  std::vector<Floats> values;
  std::vector<std::shared_ptr<OpState>> states(2);
  std::vector<c10::Stream> streams;
  for (int i = 0; i < 2; ++i) {
    values.push_back(floats(i, valuesOf(i, 4)));
    streams.push_back(anotherOn(deviceOf(i)));
  }
  const auto gate = sim::stall(streams[0]);
  cluster.onAll([&](int i) {
    const auto at = static_cast<size_t>(i);
    Operation operation = deviceAllreduce(values[at]);
    operation.device = std::make_shared<StreamSide>(streams[at]);
    states[at] = cluster.group(i).issue(std::move(operation));
  });
  EXPECT_FALSE(states[0]->wait(Deadline::after(milliseconds(20))));
  gate->open();
  for (const auto& state : states) succeed(state);
  EXPECT_EQ(values[1]->read(), sumOf(2, 4));
}

TEST_F(NcclEngineTest, WhatIsToFollowRunsBeforeTheEndAndTheTimeIsKnown) {
  NcclCluster cluster(1);
  cluster.form({0}, "behind");
  Operation first = deviceAllreduce(floats(0, {1}));
  const auto beside = first.device;
  succeed(cluster.group(0).issue(std::move(first)));
  c10::Stream current = anotherOn(deviceOf(0));
  while (current == *static_cast<StreamSide&>(*beside).stream) current = anotherOn(deviceOf(0));
  for (const bool on_current : {false, true}) {
    const Floats values = floats(0, {1, 2});
    Operation operation = deviceAllreduce(values);
    const auto side = std::make_shared<StreamSide>(current);
    side->on_current = on_current;
    side->timed = true;
    std::shared_ptr<sim::Gate> gate;
    side->behind = [&](const c10::Stream& stream) { gate = sim::stall(stream); };
    operation.device = side;
    const auto state = cluster.group(0).issue(std::move(operation));
    EXPECT_EQ(*side->stream == side->current, on_current);
    EXPECT_FALSE(side->end->query());
    gate->open();
    succeed(state);
    EXPECT_GE(side->start->elapsedTime(*side->end), 0.0);
  }
}

TEST_F(NcclEngineTest, CheckWaitsForEverythingIssued) {
  NcclCluster cluster(2);
  inject("delay allreduce ms=30 count=-1");
  cluster.form(cluster.all(), "check");
  cluster.onAll([&](int rank) {
    const Floats values = floats(rank, valuesOf(rank, 4));
    const auto state = cluster.group(rank).issue(deviceAllreduce(values));
    EXPECT_EQ(cluster.group(rank).check(testDeadline()), nullptr);
    EXPECT_TRUE(state->done());
    EXPECT_EQ(values->read(), sumOf(2, 4));
  });
}

TEST_F(NcclEngineTest, WhatNcclCannotDoIsRefusedAndTheGenerationGoesOn) {
  NcclCluster cluster(1);
  cluster.form({0}, "refuse");
  const Floats values = floats(0, {1, 2});
  Operation operation = deviceAllreduce(values);
  operation.dtype = DType::kInt16;
  EXPECT_THROW(cluster.group(0).issue(std::move(operation)), std::invalid_argument);
  EXPECT_THROW(cluster.group(0).issue(deviceSend(values, 0)), std::invalid_argument);
  EXPECT_EQ(cluster.group(0).check(testDeadline()), nullptr);
  expectSum(cluster, {0});
}

// ---- leaving

TEST_F(NcclEngineTest, AGoodbyeFinalizesAndDestroys) {
  NcclCluster cluster(2);
  cluster.form(cluster.all(), "leave");
  expectSum(cluster, cluster.all());
  cluster.onAll([&](int i) { EXPECT_TRUE(cluster.group(i).shutdown(testDeadline())); });
  EXPECT_EQ(counted("finalizes"), 2);
  EXPECT_EQ(counted("destroys"), 2);
  EXPECT_EQ(counted("aborts"), 0);
}

// A control communicator that only tells of goodbyes.
class TellingControl : public ControlCommunicator {
 public:
  void issue(std::shared_ptr<OpState>, Operation) override {}
  void onPeerLeft(const OnPeerLeft& told) override { tell = told; }
  bool tellOfFailure(Deadline) override { return true; }
  bool whenNoticesRead(std::function<void()>) override { return false; }
  bool drain(Deadline) override { return true; }
  bool leave(Deadline) override { return true; }
  uint64_t bytesSent() const override { return 0; }
  uint64_t bytesReceived() const override { return 0; }
  OnPeerLeft tell;
};

TEST_F(NcclEngineTest, WhatNeedsAMemberThatSaidGoodbyeFailsAtOnceAndCallsNothing) {
  const auto control = std::make_shared<TellingControl>();
  const auto lifecycle = std::make_shared<Lifecycle>(GenerationIdentity{"left", 1, 0, 3});
  NcclCommunicator communicator({sim::platform(), control, lifecycle, {}}, sharedNcclThreads());
  control->tell(2, false);
  const auto state =
      std::make_shared<OpState>(lifecycle, OpKind::kAllreduce, 0, Duration(kTestLimit));
  communicator.issue(state, deviceAllreduce(floats(0, {1})));
  ASSERT_TRUE(state->done());
  EXPECT_EQ(state->failure()->kind, FailureKind::kPeerLeft) << state->failure()->describe();
  EXPECT_EQ(state->failure()->cause.rank, 2);
  EXPECT_EQ(counted("unique_ids"), 0);
  PeersLeft left;
  left.add({2, false});
  EXPECT_FALSE(left.neededBy(1));
}

// A communicator that implements Communicator and no more, over another one.
class PlainCommunicator : public Communicator {
 public:
  explicit PlainCommunicator(std::shared_ptr<Communicator> inner) : inner_(std::move(inner)) {}
  void issue(std::shared_ptr<OpState> state, Operation operation) override {
    inner_->issue(std::move(state), std::move(operation));
  }
  bool drain(Deadline deadline) override { return inner_->drain(deadline); }
  bool leave(Deadline deadline) override { return inner_->leave(deadline); }
  uint64_t bytesSent() const override { return inner_->bytesSent(); }
  uint64_t bytesReceived() const override { return inner_->bytesReceived(); }

 private:
  const std::shared_ptr<Communicator> inner_;
};

class PlainEngine : public AroundEngine {
 public:
  using AroundEngine::AroundEngine;
  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override {
    auto formed = inner_->form(roster, std::move(lifecycle), deadline, superseded);
    auto* communicator = std::get_if<std::shared_ptr<Communicator>>(&formed);
    if (communicator == nullptr) return formed;
    return std::make_shared<PlainCommunicator>(std::move(*communicator));
  }
};

TEST_F(NcclEngineTest, AnEngineBelowThatCarriesNoControlMessagesIsRefused) {
  ClusterMember member(
      "0", std::make_shared<MemoryStore>(), loopbackOptions(), [](std::shared_ptr<Engine> host) {
        return makeNcclEngine(sim::platform(), std::make_shared<PlainEngine>(std::move(host)), {});
      });
  const FailurePtr failure = member.configure("plain", 0, 1);
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kInternal) << failure->describe();
  EXPECT_NE(failure->cause.how.find("'host' under NCCL"), std::string::npos) << failure->cause.how;
}

}  // namespace
}  // namespace torchft_ext
