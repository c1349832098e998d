// Registered memory pools through generations, over the NCCL engine and the simulator.
#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "cpp/comm/around_engine.h"
#include "cpp/nccl/nccl_cluster.h"
#include "nccl/memory_registry.h"

namespace torchft_ext {
namespace {

using Kind = MemoryOutcome::Kind;
using Registries = std::vector<std::shared_ptr<MemoryRegistry>>;

// Calls `before` ahead of each form().
class BeforeForm : public AroundEngine {
 public:
  BeforeForm(std::shared_ptr<Engine> inner, std::function<void()> before)
      : AroundEngine(std::move(inner)), before_(std::move(before)) {}
  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override {
    before_();
    return inner_->form(roster, std::move(lifecycle), deadline, superseded);
  }

 private:
  const std::function<void()> before_;
};

// Each member has a registry. `around` may stand between NCCL's engine and the host's, `outside`
// before NCCL's.
struct MemoryCluster {
  using Around = std::function<std::shared_ptr<Engine>(std::shared_ptr<Engine>, size_t member)>;
  explicit MemoryCluster(int size, const Around& around = nullptr, const Around& outside = nullptr)
      : cluster(size, loopbackOptions(), [this, around, outside](std::shared_ptr<Engine> host) {
          NcclEngineOptions options;
          options.memory = std::make_shared<MemoryRegistry>();
          registries.push_back(options.memory);
          if (around) host = around(std::move(host), registries.size() - 1);
          auto nccl = makeNcclEngine(sim::platform(), std::move(host), options);
          return outside ? outside(std::move(nccl), registries.size() - 1) : nccl;
        }) {}

  MemoryRegistry& of(int member) { return *registries[static_cast<size_t>(member)]; }

  Registries registries;
  Cluster cluster;
};

MemoryPool poolOf(int member, uint64_t id, const std::vector<Floats>& segments) {
  MemoryPool pool;
  pool.id = {0, id};
  pool.owner = std::make_shared<std::vector<Floats>>(segments);
  for (const Floats& one : segments)
    pool.segments.push_back({pool.id, deviceOf(member).index(),
                             reinterpret_cast<uintptr_t>(one->data()), one->all().bytes});
  return pool;
}

void expectSum(Cluster& cluster, const std::vector<int>& which) {
  Cluster::on(which, [&](int i) {
    const Floats values = floats(i, std::vector<float>(10, 1));
    const FailurePtr failure = finish(cluster.group(i).issue(deviceAllreduce(values)));
    ASSERT_EQ(failure, nullptr) << failure->describe();
    EXPECT_EQ(values->read(), std::vector<float>(10, static_cast<float>(which.size())));
  });
}

class NcclMemoryTest : public NcclTest {
 protected:
  static void addPool(MemoryCluster& world, int member, uint64_t id = 1) {
    const auto outcome =
        world.of(member).add(poolOf(member, id, {floats(member, {1, 2})}), testDeadline());
    EXPECT_EQ(outcome.kind, Kind::kDone) << outcome.why;
  }
  static void addToAll(MemoryCluster& world, uint64_t id = 1) {
    for (const int i : world.cluster.all()) addPool(world, i, id);
  }
  static int64_t live() { return counted("live_registrations"); }
  static bool allGone() {
    return waitFor([] { return sim::ncclSnapshot().communicators == 0; });
  }
  void TearDown() override {
    NcclTest::TearDown();
    EXPECT_EQ(live(), 0);
  }
};

TEST_F(NcclMemoryTest, EachNewGenerationGetsWhatWasRegisteredBefore) {
  MemoryCluster world(2);
  addToAll(world);
  for (const std::string prefix : {"a", "b", "c"}) {
    world.cluster.form({0, 1}, prefix);
    EXPECT_TRUE(waitFor([] { return live() == 0; }));
    expectSum(world.cluster, {0, 1});
    EXPECT_EQ(live(), 2);
    if (prefix == "b") world.cluster.group(0).abort("this one fails");
  }
  world.cluster.group(0).abort("enough");
  EXPECT_TRUE(allGone());
}

TEST_F(NcclMemoryTest, ALiveGenerationGetsAPoolAtOnceAndItsLaterSegmentsAlone) {
  MemoryCluster world(2);
  world.cluster.form({0, 1}, "a");
  expectSum(world.cluster, {0, 1});
  const Floats first = floats(0, {1});
  const Floats second = floats(0, {2});
  for (const auto& segments : {std::vector<Floats>{first}, {first}, {first, second}, {second}})
    EXPECT_EQ(world.of(0).add(poolOf(0, 1, segments), testDeadline()).kind, Kind::kDone);
  EXPECT_EQ(live(), 2);
  EXPECT_EQ(counted("registrations"), 2);
  expectSum(world.cluster, {0, 1});
  world.cluster.group(0).abort("enough");
  EXPECT_TRUE(allGone());
}

TEST_F(NcclMemoryTest, CommunicatorsOfTwoRanksGetNothing) {
  MemoryCluster world(2);
  addToAll(world);
  world.cluster.form({0, 1}, "a");
  world.cluster.onAll([&](int i) {
    const Floats values = floats(i, {1});
    const auto state =
        world.cluster.group(i).issue(i == 0 ? deviceSend(values, 1) : deviceRecv(values, 0));
    EXPECT_EQ(finish(state), nullptr);
  });
  EXPECT_EQ(live(), 0);
  world.cluster.group(0).abort("enough");
}

TEST_F(NcclMemoryTest, OnlySegmentsOfTheCommunicatorsDeviceAreRegistered) {
  MemoryCluster world(1);
  EXPECT_EQ(world.of(0).add(poolOf(1, 1, {floats(1, {1})}), testDeadline()).kind, Kind::kDone);
  world.cluster.form({0}, "a");
  expectSum(world.cluster, {0});
  EXPECT_EQ(counted("registrations"), 0);
  world.cluster.group(0).abort("enough");
}

TEST_F(NcclMemoryTest, ARefusalInANewCommunicatorFailsTheGenerationBeforeAnyOperation) {
  MemoryCluster world(1);
  addPool(world, 0);
  world.cluster.form({0}, "a");
  inject("fail register code=2");
  const FailurePtr failure = finish(world.cluster.group(0).issue(deviceAllreduce(floats(0, {1}))));
  ASSERT_NE(failure, nullptr);
  EXPECT_NE(failure->describe().find("8 bytes at 0x"), std::string::npos) << failure->describe();
  EXPECT_EQ(counted("allreduce"), 0);
  world.cluster.form({0}, "b");
  expectSum(world.cluster, {0});
  EXPECT_EQ(live(), 1);
  world.cluster.group(0).abort("enough");
}

TEST_F(NcclMemoryTest, ARefusalInALiveOneIsToldAndTheGenerationGoesOnWithoutThePool) {
  MemoryCluster world(2);
  world.cluster.form({0, 1}, "a");
  expectSum(world.cluster, {0, 1});
  inject("fail register code=5");
  const auto refused = world.of(0).add(poolOf(0, 1, {floats(0, {1})}), testDeadline());
  EXPECT_EQ(refused.kind, Kind::kRefused);
  EXPECT_NE(refused.why.find("4 bytes at 0x"), std::string::npos) << refused.why;
  EXPECT_FALSE(world.of(0).knows({0, 1}));
  EXPECT_EQ(live(), 0);
  expectSum(world.cluster, {0, 1});
  addToAll(world);
  EXPECT_EQ(live(), 2);
  world.cluster.group(0).abort("enough");
}

TEST_F(NcclMemoryTest, RemovedPoolsLeaveTheGenerationAndThoseToCome) {
  MemoryCluster world(2);
  addToAll(world, 1);
  addToAll(world, 2);
  world.cluster.form({0, 1}, "a");
  expectSum(world.cluster, {0, 1});
  EXPECT_EQ(live(), 4);
  for (const int i : {0, 1})
    EXPECT_EQ(world.of(i).remove({0, 1}, testDeadline()).kind, Kind::kDone);
  EXPECT_EQ(live(), 2);
  EXPECT_EQ(world.of(0).remove({0, 1}, testDeadline()).kind, Kind::kUnknown);
  world.cluster.form({0, 1}, "b");
  expectSum(world.cluster, {0, 1});
  EXPECT_TRUE(waitFor([] { return live() == 2; }));
  world.cluster.group(0).abort("enough");
}

TEST_F(NcclMemoryTest, AGoodbyeDeregistersAndFinalizes) {
  MemoryCluster world(2);
  addToAll(world);
  world.cluster.form({0, 1}, "a");
  expectSum(world.cluster, {0, 1});
  world.cluster.onAll([&](int i) { EXPECT_TRUE(world.cluster.group(i).shutdown(testDeadline())); });
  EXPECT_EQ(live(), 0);
  EXPECT_EQ(counted("destroys"), 2);
  EXPECT_EQ(counted("aborts"), 0);
}

TEST_F(NcclMemoryTest, AnAbortDeregistersNothingAndAsksNobody) {
  MemoryCluster world(2);
  addToAll(world);
  world.cluster.form({0, 1}, "a");
  expectSum(world.cluster, {0, 1});
  inject("block deregister count=-1");
  world.cluster.group(0).abort("with memory registered");
  EXPECT_TRUE(allGone());
  EXPECT_EQ(live(), 0);
}

// ---- lifetimes

TEST_F(NcclMemoryTest, MemoryOfAFailedGenerationIsKeptUntilNcclHasFreedIt) {
  MemoryCluster world(2);
  MemoryPool pool = poolOf(0, 1, {floats(0, {1})});
  const std::weak_ptr<void> owner = pool.owner;
  EXPECT_EQ(world.of(0).add(std::move(pool), testDeadline()).kind, Kind::kDone);
  world.cluster.form({0, 1}, "a");
  expectSum(world.cluster, {0, 1});
  inject("block abort rank=0");
  world.cluster.group(0).abort("while memory is registered");
  EXPECT_EQ(world.of(0).remove({0, 1}, testDeadline()).kind, Kind::kDone);
  EXPECT_TRUE(waitFor([] { return !sim::Faults::instance().armed("abort"); }));
  EXPECT_FALSE(owner.expired());
  EXPECT_EQ(world.of(0).notFreed().size(), 1);
  inject("clear");
  EXPECT_TRUE(waitFor([&] { return owner.expired(); }));
  EXPECT_EQ(world.of(0).notFreed().size(), 0);
}

TEST_F(NcclMemoryTest, ClosingForgetsThePoolsAndRefusesMore) {
  MemoryRegistry registry;
  MemoryPool pool = poolOf(0, 1, {floats(0, {1})});
  const std::weak_ptr<void> owner = pool.owner;
  EXPECT_EQ(registry.add(std::move(pool), testDeadline()).kind, Kind::kDone);
  EXPECT_TRUE(registry.knows({0, 1}));
  registry.close();
  EXPECT_TRUE(owner.expired());
  EXPECT_EQ(registry.add(poolOf(0, 1, {}), testDeadline()).kind, Kind::kClosed);
  EXPECT_EQ(registry.remove({0, 1}, testDeadline()).kind, Kind::kClosed);
}

// ---- promise 6: nobody leaves configure() before all have freed what could write into its memory

TEST_F(NcclMemoryTest, TheBarrierOfTheNextGenerationIsNotEnteredBeforeOldCommunicatorsAreFreed) {
  std::atomic<int> formed{0};
  std::atomic<int> too_early{0};
  MemoryCluster* all = nullptr;
  MemoryCluster world(2, [&](std::shared_ptr<Engine> host, size_t member) {
    return std::make_shared<BeforeForm>(std::move(host), [&, member] {
      ++formed;
      if (!all->of(static_cast<int>(member)).notFreed().empty()) ++too_early;
    });
  });
  all = &world;
  addToAll(world);
  world.cluster.form({0, 1}, "a");
  expectSum(world.cluster, {0, 1});
  inject("block abort rank=1 ms=300");
  world.cluster.group(0).abort("the other one's abort is slow");
  world.cluster.form({0, 1}, "b");
  EXPECT_GE(formed, 4);
  EXPECT_EQ(too_early, 0);
  expectSum(world.cluster, {0, 1});
  world.cluster.group(0).abort("enough");
}

TEST_F(NcclMemoryTest, WithoutRegistrationsConfigureDoesNotWaitForThem) {
  MemoryCluster world(2);
  world.cluster.form({0, 1}, "a");
  expectSum(world.cluster, {0, 1});
  inject("block abort rank=1");
  world.cluster.group(0).abort("the other one's abort hangs");
  world.cluster.form({0, 1}, "b");
  EXPECT_GE(sim::ncclSnapshot().communicators, 1);
  inject("clear");
  expectSum(world.cluster, {0, 1});
  world.cluster.group(0).abort("enough");
}

TEST_F(NcclMemoryTest, WhereTheyAreNotFreedInTimeConfigureSaysSoAndCanBeRepeated) {
  MemoryCluster world(2);
  addToAll(world);
  world.cluster.form({0, 1}, "a");
  expectSum(world.cluster, {0, 1});
  inject("block abort rank=1");
  world.cluster.group(0).abort("the other one's abort hangs");
  std::array<FailurePtr, 2> failures;
  world.cluster.onAll([&](int i) {
    const Duration limit = i == 1 ? Duration(milliseconds(300)) : kTestLimit;
    failures[static_cast<size_t>(i)] =
        world.cluster.members[static_cast<size_t>(i)]->configure("b", i, 2, limit);
  });
  for (const FailurePtr& failure : failures) {
    ASSERT_NE(failure, nullptr);
    EXPECT_NE(failure->describe().find("has not freed the communicator"), std::string::npos)
        << failure->describe();
  }
  inject("clear");
  world.cluster.form({0, 1}, "b");
  expectSum(world.cluster, {0, 1});
  world.cluster.group(0).abort("enough");
}

TEST_F(NcclMemoryTest, AnAbortEndsTheWaitForThem) {
  std::atomic<int> attempts{0};
  MemoryCluster world(1, nullptr, [&](std::shared_ptr<Engine> nccl, size_t) {
    return std::make_shared<BeforeForm>(std::move(nccl), [&] { ++attempts; });
  });
  addPool(world, 0);
  world.cluster.form({0}, "a");
  expectSum(world.cluster, {0});
  inject("block abort");
  world.cluster.group(0).abort("it hangs");
  FailurePtr failure;
  std::thread configuring([&] { failure = world.cluster.members[0]->configure("b", 0, 1); });
  EXPECT_TRUE(waitFor([&] { return attempts == 2; }));
  world.cluster.group(0).abort("no longer wanted");
  configuring.join();
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kAborted) << failure->describe();
  EXPECT_EQ(world.of(0).notFreed().size(), 1);
}

}  // namespace
}  // namespace torchft_ext
