// A failure that is held back, of members that share memory: what had been published before it is
// carried out, though the nudge for it was lost with its sender's generation.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpp/comm/around_engine.h"
#include "cpp/comm/cluster.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

constexpr auto kHeldUp = std::chrono::milliseconds(500);
constexpr int kLeaver = 2;

// Remembers the lifecycle of its last generation.
class Remembers : public AroundEngine {
 public:
  using AroundEngine::AroundEngine;
  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override {
    lifecycle_ = lifecycle;
    return inner_->form(roster, std::move(lifecycle), deadline, superseded);
  }
  const std::shared_ptr<Lifecycle>& lifecycle() const { return lifecycle_; }

 private:
  std::shared_ptr<Lifecycle> lifecycle_;
};

// Fails its generation for want of a leaver between the lane's look at the lifecycle and what it
// publishes then.
class FailsAsItBegins : public Exchanges {
 public:
  explicit FailsAsItBegins(std::shared_ptr<Lifecycle> lifecycle)
      : lifecycle_(std::move(lifecycle)) {}
  void begin() override {
    Failure failure;
    failure.kind = FailureKind::kPeerLeft;
    failure.cause.rank = kLeaver;
    failure.cause.how = "a test said that it left";
    lifecycle_->fail(std::move(failure));
  }
  Next next(Operation& /*operation*/) override { return {}; }

 private:
  const std::shared_ptr<Lifecycle> lifecycle_;
};

Operation broadcastOf(std::vector<float>& values) {
  Operation operation;
  operation.kind = OpKind::kBroadcast;
  operation.dtype = DType::kFloat;
  operation.outputs = {bufferOf(values)};
  return operation;
}

TEST(HeldLane, CompletesWhatWasPublishedThoughTheNudgeWasDropped) {
  const auto data = std::make_shared<MemoryStore>();
  std::vector<std::shared_ptr<Remembers>> engines;
  std::vector<std::unique_ptr<ClusterMember>> members;
  for (int rank = 0; rank < 3; ++rank) {
    members.push_back(std::make_unique<ClusterMember>(
        std::to_string(rank), data, loopbackOptions(), [&](std::shared_ptr<Engine> engine) {
          engines.push_back(std::make_shared<Remembers>(std::move(engine)));
          return engines.back();
        }));
  }
  Cluster::on({0, 1, 2}, [&](int rank) {
    const FailurePtr failure = members[static_cast<size_t>(rank)]->configure("held", rank, 3);
    ASSERT_EQ(failure, nullptr) << failure->describe();
  });
  // Nobody waits for it: rank 0 nudges this one once it has published.
  std::vector<float> received(3);
  const auto receiving = members[1]->group->issue(broadcastOf(received));
  ASSERT_FALSE(receiving->done());
  // The loop of rank 0 learns of the failure first, and of the nudge after it.
  holdUpForTest(*members[0]->engine, kHeldUp);
  std::vector<float> sent(3, 7);
  Operation operation = broadcastOf(sent);
  operation.exchanges = std::make_shared<FailsAsItBegins>(engines[0]->lifecycle());
  members[0]->group->issue(std::move(operation));
  // done() alone: a wait would look itself.
  ASSERT_TRUE(waitFor([&] { return receiving->done(); }));
  EXPECT_EQ(receiving->failure(), nullptr) << receiving->failure()->describe();
  EXPECT_EQ(received, sent);
  ASSERT_TRUE(waitFor([&] { return engines[1]->lifecycle()->over(); }));
  EXPECT_EQ(engines[1]->lifecycle()->failure()->cause.rank, kLeaver);
}

}  // namespace
}  // namespace torchft_ext
