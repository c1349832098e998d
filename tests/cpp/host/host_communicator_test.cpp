// The end of a host communicator: who may own it last, and what is said then.
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "cpp/comm/around_engine.h"
#include "cpp/comm/cluster.h"

namespace torchft_ext {
namespace {

// Hands its communicators to subscribers of their lifecycles, which then are their last owners.
class HandsOver : public AroundEngine {
 public:
  HandsOver(std::shared_ptr<Engine> inner, std::shared_ptr<std::promise<void>> ended)
      : AroundEngine(std::move(inner)), ended_(std::move(ended)) {}

  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override {
    auto formed = inner_->form(roster, lifecycle, deadline, superseded);
    if (auto* communicator = std::get_if<std::shared_ptr<Communicator>>(&formed)) {
      const std::shared_ptr<void> told(nullptr, [ended = ended_](void*) { ended->set_value(); });
      lifecycle->subscribe([told, kept = *communicator](const FailurePtr&) {});
    }
    return formed;
  }

 private:
  const std::shared_ptr<std::promise<void>> ended_;
};

// Its lifecycles fail as soon as they have formed, and the thread that fails them is held up before
// it has told the host generation.
class FailsSlowly : public AroundEngine {
 public:
  FailsSlowly(std::shared_ptr<Engine> inner, std::shared_future<void> go_on)
      : AroundEngine(std::move(inner)), go_on_(std::move(go_on)) {}
  ~FailsSlowly() override {
    for (std::thread& failing : failing_) failing.join();
  }

  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override {
    lifecycle->subscribe([go_on = go_on_](const FailurePtr&) { go_on.wait(); });  // the first
    auto formed = inner_->form(roster, lifecycle, deadline, superseded);
    failing_.emplace_back([lifecycle] {
      Failure failure;
      failure.kind = FailureKind::kAborted;
      failure.cause.rank = 0;
      failure.cause.how = "a test said so";
      lifecycle->fail(std::move(failure));
    });
    while (!lifecycle->over()) std::this_thread::yield();
    return formed;
  }

 private:
  const std::shared_future<void> go_on_;
  std::vector<std::thread> failing_;
};

TEST(HostCommunicator, SaysItsFinalFrameThoughItsOwnerIsFasterThanTheUpdates) {
  std::promise<void> go_on;
  Cluster cluster(2);
  ClusterMember& member = *cluster.members[0];
  auto engine = std::make_shared<FailsSlowly>(member.engine, go_on.get_future().share());
  member.group = std::make_unique<Group>("test", engine, std::make_shared<Watchdog>(), kTestLimit);
  FailurePtr struck;
  std::vector<float> values(1);
  FailurePtr told;
  Cluster::on({0, 1}, [&](int i) {
    const FailurePtr failure = cluster.members[static_cast<size_t>(i)]->configure("words", i, 2);
    if (i == 0) struck = failure;
    if (i == 1) told = failure ? failure : finish(cluster.group(1).issue(recvOf(values, 0)));
  });
  ASSERT_NE(struck, nullptr);
  ASSERT_NE(told, nullptr);
  EXPECT_EQ(told->kind, FailureKind::kAborted) << told->describe();
  EXPECT_EQ(told->cause.how, "a test said so");
  go_on.set_value();
}

TEST(HostCommunicator, MayHaveItsLastOwnerOnItsOwnLoop) {
  auto ended = std::make_shared<std::promise<void>>();
  Cluster cluster(2);
  auto inner = std::get<std::shared_ptr<Engine>>(makeHostEngineForTest(loopbackOptions()));
  ClusterMember& member = *cluster.members[0];
  member.group = std::make_unique<Group>("test", std::make_shared<HandsOver>(inner, ended),
                                         std::make_shared<Watchdog>(), kTestLimit);
  cluster.form(cluster.all(), "last");
  const std::weak_ptr<Engine> engine = inner;
  inner.reset();
  member.group.reset();
  // The news comes over the loop of member 0, whose engine nobody else owns by now.
  cluster.group(1).abort("a test said so");
  ASSERT_EQ(ended->get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
  const Deadline limit = Deadline::after(kTestLimit);
  while (!engine.expired() && !limit.expired()) std::this_thread::yield();
  EXPECT_TRUE(engine.expired());
}

}  // namespace
}  // namespace torchft_ext
