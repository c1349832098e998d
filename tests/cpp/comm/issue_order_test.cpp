#include "comm/issue_order.h"

#include <gtest/gtest.h>

#include <atomic>

#include "comm/op_state.h"
#include "cpp/comm/throwing_hook.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

TEST(IssueOrder, IsOneThreadsAtATime) {
  IssueOrder order;
  int inside = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 1000; ++round) {
        ASSERT_TRUE(order.enter(testDeadline()));
        EXPECT_EQ(++inside, 1);
        --inside;
        order.leave();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(IssueOrder, IsNotWaitedForBeyondTheDeadline) {
  IssueOrder order;
  std::thread([&] { EXPECT_TRUE(order.enter(testDeadline())); }).join();
  EXPECT_FALSE(order.enter(Deadline::after(milliseconds(10))));
}

// As a signal's handler may come to it, inside a wait of the thread that it interrupts.
TEST(IssueOrder, RefusesWhoHasItAlready) {
  IssueOrder order;
  ASSERT_TRUE(order.enter(testDeadline()));
  EXPECT_THROW(order.enter(testDeadline()), std::runtime_error);
  order.leave();
  EXPECT_TRUE(order.enter(testDeadline()));
}

TEST(IssueOrder, LeavesItsWaitWithWhatTheHookThrows) {
  IssueOrder order;
  std::thread([&] { EXPECT_TRUE(order.enter(testDeadline())); }).join();
  const ThrowingHook hook;
  EXPECT_THROW(order.enter(testDeadline()), Interrupted);
}

}  // namespace
}  // namespace torchft_ext
