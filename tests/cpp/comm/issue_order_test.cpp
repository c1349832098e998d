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

TEST(IssueOrder, IsTakenWithoutAWaitWhereItIsFree) {
  IssueOrder order;
  EXPECT_TRUE(order.tryEnter());
  EXPECT_THROW(order.tryEnter(), std::runtime_error);
  std::thread([&] { EXPECT_FALSE(order.tryEnter()); }).join();
  order.leave();
  std::thread([&] {
    EXPECT_TRUE(order.tryEnter());
    order.leave();
  }).join();
}

// Of two that are needed the first is given back where the second is taken.
TEST(IssueOrders, AreTakenTogetherOrNotAtAll) {
  IssueOrders orders;
  auto device = orders.tryEnter(false, true);
  ASSERT_TRUE(device);
  std::thread([&] {
    EXPECT_FALSE(orders.tryEnter(true, true));
    EXPECT_TRUE(orders.tryEnter(true, false));
  }).join();
  device.reset();
  EXPECT_TRUE(orders.tryEnter(true, true));
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
