// Who may own a host communicator last.
#include <gtest/gtest.h>

#include <future>

#include "cluster.h"

namespace torchft_ext {
namespace {

// Hands its communicators to subscribers of their lifecycles, which then are their last owners.
class HandsOver : public Engine {
 public:
  HandsOver(std::shared_ptr<Engine> inner, std::shared_ptr<std::promise<void>> ended)
      : inner_(std::move(inner)), ended_(std::move(ended)) {}

  const char* name() const override { return inner_->name(); }
  std::vector<std::pair<std::string, int64_t>> counters() const override {
    return inner_->counters();
  }
  std::variant<MemberRecord, Failure> describeSelf() override { return inner_->describeSelf(); }
  std::unique_ptr<Vigil> keepVigil(int size) override { return inner_->keepVigil(size); }
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
  const std::shared_ptr<Engine> inner_;
  const std::shared_ptr<std::promise<void>> ended_;
};

TEST(HostCommunicator, MayHaveItsLastOwnerOnItsOwnLoop) {
  auto ended = std::make_shared<std::promise<void>>();
  Cluster cluster(2);
  auto inner = std::get<std::shared_ptr<Engine>>(makeHostEngineForTest(loopbackOptions()));
  Member& member = *cluster.members[0];
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
