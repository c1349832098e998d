// An engine that is still inside an operation after its end: who waits for it, how long, what is
// said, and who keeps the buffers.
#include <gtest/gtest.h>

#include <future>
#include <string>
#include <thread>

#include "c10d/work/comm_error.h"
#include "c10d/work/ft_work.h"
#include "comm/control_communicator.h"
#include "cpp/comm/around_engine.h"
#include "cpp/comm/cluster.h"
#include "cpp/comm/throwing_hook.h"
#include "cpp/support/captured_log.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

constexpr const char* kStillInside = "still inside an operation 50 ms after its end";
constexpr const char* kDidNotLeave = "did not leave an operation by the deadline";
constexpr const char* kHasNotReleased = "has not let go of its tensors: they stay alive";
constexpr milliseconds kShort{200};

// Its loop is held up when a peer says goodbye, in the middle of a generation: the first one.
class HeldLoop : public AroundEngine {
 public:
  struct Hold {
    std::promise<void> entered;
    std::promise<void> go_on;
  };

  HeldLoop(std::shared_ptr<Engine> inner, std::shared_ptr<Hold> hold)
      : AroundEngine(std::move(inner)), hold_(std::move(hold)) {}

  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override {
    auto formed = inner_->form(roster, lifecycle, deadline, superseded);
    auto* communicator = std::get_if<std::shared_ptr<Communicator>>(&formed);
    if (communicator != nullptr && !std::exchange(formed_, true)) {
      const auto control = std::dynamic_pointer_cast<ControlCommunicator>(*communicator);
      control->onPeerLeft([hold = hold_](int, bool) {
        hold->entered.set_value();
        hold->go_on.get_future().wait();
      });
    }
    return formed;
  }

 private:
  const std::shared_ptr<Hold> hold_;
  bool formed_ = false;  // the thread of configure() only
};

// Two members. In that of rank 0 a receive is under way, and its engine stays inside. The other one
// has left.
class EngineInside : public testing::Test {
 protected:
  EngineInside() {
    ClusterMember& member = *cluster_.members[0];
    auto engine = std::make_shared<HeldLoop>(member.engine, hold_);
    member.group =
        std::make_unique<Group>("test", engine, std::make_shared<Watchdog>(), kTestLimit);
    cluster_.form({0, 1}, "first");
  }
  ~EngineInside() override { releaseBuffers(); }
  void TearDown() override { EXPECT_FALSE(late_.expired()) << "a wait was not bounded"; }

  // timeout: the operation's.
  void strike(Duration timeout = kTestLimit) {
    auto buffer = std::make_shared<std::vector<float>>(1000, 3.0F);
    buffer_ = buffer;
    Operation operation = recvOf(*buffer, 1);
    operation.timeout = timeout;
    operation.keep_alive = std::move(buffer);
    state_ = group().issue(std::move(operation));
    cluster_.members[1]->group->shutdown(testDeadline());
    ASSERT_EQ(hold_->entered.get_future().wait_for(kTestPatience), std::future_status::ready);
  }
  void releaseBuffers() {
    if (!std::exchange(released_, true)) hold_->go_on.set_value();
  }
  Group& group() { return cluster_.group(0); }
  bool inside() const { return !buffer_.expired(); }
  // The engine has left in the end, and nothing keeps the buffer any more.
  bool leaves() {
    releaseBuffers();
    return waitFor([this] { return !inside(); });
  }

  const CapturedLog log_;
  const Deadline late_ = Deadline::after(kTestLimit / 2);
  const std::shared_ptr<HeldLoop::Hold> hold_ = std::make_shared<HeldLoop::Hold>();
  bool released_ = false;
  Cluster cluster_{2};
  std::weak_ptr<void> buffer_;
  std::shared_ptr<OpState> state_;
};

TEST_F(EngineInside, AbortReturnsWhenItHasLeftAndIsReportedAfterFiftyMilliseconds) {
  strike();
  auto aborting = std::async(std::launch::async, [this] { group().abort("enough"); });
  EXPECT_TRUE(waitFor([] { return CapturedLog::contains(kStillInside); }));
  EXPECT_EQ(aborting.wait_for(kShort), std::future_status::timeout);
  EXPECT_FALSE(state_->done());
  releaseBuffers();
  aborting.get();
  EXPECT_TRUE(state_->done());
  EXPECT_FALSE(CapturedLog::contains(kDidNotLeave));
}

// Of several groups all are begun before the first is waited for.
TEST_F(EngineInside, TheFirstHalfOfAnAbortWaitsForNothing) {
  strike();
  group().beginAbort("enough");
  EXPECT_TRUE(inside());
  ASSERT_NE(group().errored(), nullptr);
  EXPECT_NE(group().errored()->at, Clock::time_point{});
  EXPECT_TRUE(leaves());
  EXPECT_EQ(finish(state_)->kind, FailureKind::kAborted);
}

TEST_F(EngineInside, AGroupThatFollowsAJobAdvisesItsRecover) {
  strike();
  releaseBuffers();
  group().setJob(JobMembership::following(nullptr));
  cluster_.form({0}, "second");
  group().abort("enough");
  const std::string told = group().errored()->describe();
  EXPECT_NE(told.find("recover()"), std::string::npos) << told;
  EXPECT_EQ(told.find("configure()"), std::string::npos) << told;
}

TEST_F(EngineInside, AbortEndsByTheGroupsTimeoutIsReportedAndTheBuffersStay) {
  group().setTimeout(kShort);
  strike();
  group().abort("enough");
  EXPECT_TRUE(CapturedLog::contains(kDidNotLeave));
  EXPECT_FALSE(state_->done());
  EXPECT_TRUE(inside());
  EXPECT_TRUE(leaves());
  EXPECT_EQ(finish(state_)->kind, FailureKind::kAborted);
  cluster_.form({0}, "second");
}

TEST_F(EngineInside, AbortIsLeftWhenASignalsHandlerThrowsAndTheBuffersStay) {
  strike();
  {
    const ThrowingHook hook;
    EXPECT_THROW(group().abort("enough"), Interrupted);
  }
  EXPECT_TRUE(inside());
  EXPECT_TRUE(leaves());
  EXPECT_EQ(finish(state_)->kind, FailureKind::kAborted);
  cluster_.form({0}, "second");
}

TEST_F(EngineInside, ConfigureFailsByItsDeadlineSaysWhyAndTheNextOneWorks) {
  strike();
  const FailurePtr failure = cluster_.members[0]->configure("second", 0, 1, kShort);
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kTimeout) << failure->describe();
  EXPECT_NE(
      failure->describe().find("the engine did not leave an operation of the last generation"),
      std::string::npos)
      << failure->describe();
  EXPECT_TRUE(CapturedLog::contains(kDidNotLeave));
  EXPECT_TRUE(inside());
  EXPECT_TRUE(leaves());
  cluster_.form({0}, "third");
}

// The generation that configure() is ending is nobody's current one.
TEST_F(EngineInside, AbortWhileConfigureEndsTheGenerationReturnsWhenTheEngineHasLeft) {
  strike();
  auto configuring = std::async(std::launch::async,
                                [this] { return cluster_.members[0]->configure("second", 0, 1); });
  EXPECT_TRUE(waitFor([] { return CapturedLog::contains(kStillInside); }));
  auto aborting = std::async(std::launch::async, [this] { group().abort("enough"); });
  EXPECT_EQ(aborting.wait_for(kShort), std::future_status::timeout);
  EXPECT_FALSE(state_->done());
  releaseBuffers();
  aborting.get();
  EXPECT_TRUE(state_->done());
  const FailurePtr failure = configuring.get();
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kAborted) << failure->describe();
  cluster_.form({0}, "third");
}

TEST_F(EngineInside, ShutdownWhileConfigureEndsTheGenerationEndsByItsDeadline) {
  strike();
  auto configuring = std::async(std::launch::async,
                                [this] { return cluster_.members[0]->configure("second", 0, 1); });
  EXPECT_TRUE(waitFor([] { return CapturedLog::contains(kStillInside); }));
  EXPECT_FALSE(group().shutdown(Deadline::after(kShort)));
  EXPECT_TRUE(inside());
  EXPECT_TRUE(leaves());
  EXPECT_NE(configuring.get(), nullptr);
}

TEST_F(EngineInside, ShutdownEndsByItsDeadlineAndTheBuffersStay) {
  strike();
  EXPECT_FALSE(group().shutdown(Deadline::after(kShort)));
  EXPECT_TRUE(CapturedLog::contains(kDidNotLeave));
  EXPECT_TRUE(inside());
  EXPECT_TRUE(leaves());
}

TEST_F(EngineInside, AGroupIsDestroyedWithoutWaitingAndTheBuffersStay) {
  strike();
  cluster_.members[0]->group.reset();
  EXPECT_FALSE(state_->done());
  EXPECT_TRUE(inside());
  EXPECT_TRUE(leaves());
}

// What wait() ends with, which must be an exception.
Failure failureOfWait(FtWork& work, std::chrono::milliseconds timeout) {
  try {
    work.wait(timeout);
  } catch (const CommError& error) {
    return error.failure();
  }
  ADD_FAILURE() << "wait() returned";
  return {};
}

FtWork workOf(const std::shared_ptr<OpState>& state) {
  return {Described{c10d::OpType::RECV, "ft:recv", std::nullopt, {}}, {state}, std::nullopt};
}

TEST_F(EngineInside, AWaitWithATimeoutGivesUpIsReportedAndTheBuffersStay) {
  strike();
  FtWork work = workOf(state_);
  EXPECT_EQ(failureOfWait(work, kShort).kind, FailureKind::kTimeout);
  EXPECT_TRUE(CapturedLog::contains(kHasNotReleased));
  EXPECT_TRUE(work.isCompleted());
  EXPECT_TRUE(inside());
  EXPECT_TRUE(leaves());
}

TEST_F(EngineInside, AWaitUpToTheOperationsOwnDeadlineGivesUpIsReportedAndTheBuffersStay) {
  strike(std::chrono::seconds(2));  // that the goodbye comes first
  FtWork work = workOf(state_);
  EXPECT_EQ(failureOfWait(work, kNoTimeout).kind, FailureKind::kTimeout);
  EXPECT_TRUE(CapturedLog::contains(kHasNotReleased));
  EXPECT_TRUE(work.isCompleted());
  EXPECT_TRUE(inside());
  EXPECT_TRUE(leaves());
}

}  // namespace
}  // namespace torchft_ext
