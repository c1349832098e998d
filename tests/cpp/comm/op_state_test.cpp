#include "comm/op_state.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <future>
#include <stdexcept>
#include <thread>

#include "comm/callbacks.h"
#include "cpp/comm/throwing_hook.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kPatience{30};

std::shared_ptr<Lifecycle> makeLifecycle() {
  return std::make_shared<Lifecycle>(GenerationIdentity{"dp0", 5, 3, 8});
}

std::shared_ptr<OpState> makeOp(Duration timeout = kPatience) {
  return std::make_shared<OpState>(makeLifecycle(), OpKind::kAllreduce, 42, timeout);
}

FailurePtr aborted() {
  Failure failure;
  failure.kind = FailureKind::kAborted;
  failure.cause.how = "abort() was called";
  return std::make_shared<const Failure>(std::move(failure));
}

TEST(OpState, WaitReturnsWhenAnotherThreadCompletes) {
  const auto op = makeOp();
  std::thread completer([op] { op->complete(nullptr); });
  EXPECT_TRUE(op->wait(Deadline::after(kPatience)));
  EXPECT_TRUE(op->done());
  EXPECT_EQ(op->failure(), nullptr);
  completer.join();
}

TEST(OpState, WaitReturnsFalseAtItsDeadlineAndLeavesTheOperationAlone) {
  const auto op = makeOp();
  EXPECT_FALSE(op->wait(Deadline::after(milliseconds(5))));
  EXPECT_FALSE(op->done());
  op->complete(nullptr);
  EXPECT_TRUE(op->wait(Deadline::at(Clock::now())));
}

TEST(OpState, OnlyTheFirstCompletionCounts) {
  const auto op = makeOp();
  op->complete(nullptr);
  op->complete(aborted());
  EXPECT_EQ(op->failure(), nullptr);
}

TEST(OpState, AFailureIsCompletedWithTheOperationsPlace) {
  const auto op = makeOp();
  op->complete(aborted());
  const FailurePtr failure = op->failure();
  EXPECT_EQ(failure->op, "allreduce");
  EXPECT_EQ(failure->seq, 42);
  EXPECT_EQ(failure->group, "dp0");
  EXPECT_EQ(failure->rank, 3);
  EXPECT_EQ(failure->limit, std::chrono::nanoseconds(kPatience));
  EXPECT_GT(failure->elapsed.count(), 0);
  EXPECT_EQ(failure->cause.how, "abort() was called");
}

TEST(OpState, CallbacksRunOnceOnTheCallbackThreadBeforeAndAfterCompletion) {
  const auto op = makeOp();
  std::promise<bool> early;
  std::promise<bool> late;
  op->onDone([&] { early.set_value(onCallbackThread()); });
  op->complete(nullptr);
  op->onDone([&] { late.set_value(onCallbackThread()); });
  auto early_result = early.get_future();
  auto late_result = late.get_future();
  ASSERT_EQ(early_result.wait_for(kPatience), std::future_status::ready);
  ASSERT_EQ(late_result.wait_for(kPatience), std::future_status::ready);
  EXPECT_TRUE(early_result.get());
  EXPECT_TRUE(late_result.get());
  EXPECT_FALSE(onCallbackThread());
}

TEST(OpState, CallbacksAtOnceRunOnTheThreadThatCompletesOrComesLater) {
  const auto op = makeOp();
  std::thread::id early;
  std::thread::id late;
  op->onDoneAtOnce([&, op] {
    EXPECT_NE(op->failure(), nullptr);
    early = std::this_thread::get_id();
  });
  std::thread completer([op] { op->complete(aborted()); });
  const std::thread::id completing = completer.get_id();
  completer.join();
  op->complete(nullptr);
  op->onDoneAtOnce([&] { late = std::this_thread::get_id(); });
  EXPECT_EQ(early, completing);
  EXPECT_EQ(late, std::this_thread::get_id());
}

TEST(OpState, WaitDoesNotDependOnTheCallbackThread) {
  std::promise<void> release;
  std::promise<void> entered;
  const auto first = makeOp();
  first->onDone([&, released = release.get_future().share()] {
    entered.set_value();
    released.wait();
  });
  first->complete(nullptr);
  ASSERT_EQ(entered.get_future().wait_for(kPatience), std::future_status::ready);
  const auto second = makeOp();
  second->onDone([] {});
  second->complete(nullptr);
  EXPECT_TRUE(second->wait(Deadline::after(kPatience)));
  release.set_value();
}

TEST(OpState, AThrowingCallbackLeavesTheNextOneAlive) {
  const auto op = makeOp();
  std::promise<void> ran;
  op->onDone([] { throw std::runtime_error("a test's"); });
  op->onDone([&] { ran.set_value(); });
  op->complete(nullptr);
  EXPECT_EQ(ran.get_future().wait_for(kPatience), std::future_status::ready);
}

TEST(OpState, AnExceptionOfTheWaitHookLeavesTheWait) {
  const auto op = makeOp();
  {
    const ThrowingHook hook;
    EXPECT_THROW(op->wait(Deadline::after(kPatience)), Interrupted);
  }
  op->complete(nullptr);
  EXPECT_TRUE(op->wait(Deadline::after(kPatience)));
}

std::atomic<OpState*> hooked{nullptr};

TEST(OpState, TheWaitHookRunsWithoutALockHeld) {
  const auto op = makeOp();
  hooked = op.get();
  setWaitHook([] { hooked.load()->complete(nullptr); });
  EXPECT_TRUE(op->wait(Deadline::after(kPatience)));
  setWaitHook(nullptr);
}

// True: what was queued before the stop ran, what came later did not.
bool callbacksAreDroppedAfterTheStop() {
  std::atomic<bool> queued_ran{false};
  runOnCallbackThread([&] { queued_ran = true; });
  if (!stopCallbackThreads(Deadline::after(kPatience)) || !queued_ran) return false;
  bool late_ran = false;
  const auto op = makeOp();
  op->onDone([&, backup = std::make_shared<int>(1)] { late_ran = true; });
  op->complete(nullptr);
  return op->wait(Deadline::after(kPatience)) && !late_ran &&
         stopCallbackThreads(Deadline::after(kPatience));
}

// In a process of its own: the stop is for good.
TEST(OpStateDeathTest, CallbacksAreDroppedOnceTheirThreadWasStopped) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(_exit(callbacksAreDroppedAfterTheStop() ? 0 : 1), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace torchft_ext
