#include "comm/lifecycle.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>
#include <vector>

namespace torchft_ext {
namespace {

Failure because(const std::string& how) {
  Failure failure;
  failure.kind = FailureKind::kAborted;
  failure.cause.how = how;
  return failure;
}

TEST(Lifecycle, TheFirstFailureWinsAndIsKept) {
  Lifecycle lifecycle({"dp0", 5, 3, 8});
  EXPECT_TRUE(lifecycle.activate());
  EXPECT_EQ(lifecycle.failure(), nullptr);
  EXPECT_TRUE(lifecycle.fail(because("first")));
  EXPECT_FALSE(lifecycle.fail(because("second")));
  EXPECT_TRUE(lifecycle.over());
  EXPECT_EQ(lifecycle.failure()->cause.how, "first");
}

TEST(Lifecycle, CompletesTheFailureWithItsIdentity) {
  Lifecycle lifecycle({"dp0", 5, 3, 8});
  lifecycle.fail(because("x"));
  const FailurePtr failure = lifecycle.failure();
  EXPECT_EQ(failure->group, "dp0");
  EXPECT_EQ(failure->generation, 5);
  EXPECT_EQ(failure->rank, 3);
  EXPECT_EQ(failure->size, 8);
}

TEST(Lifecycle, FailureAndEndAreFinal) {
  Lifecycle failed({});
  failed.fail(because("x"));
  EXPECT_FALSE(failed.activate());
  EXPECT_FALSE(failed.end());
  EXPECT_EQ(failed.state(), Lifecycle::State::kFailed);

  Lifecycle ended({});
  EXPECT_TRUE(ended.activate());
  EXPECT_TRUE(ended.end());
  EXPECT_FALSE(ended.fail(because("too late")));
  EXPECT_FALSE(ended.activate());
  EXPECT_EQ(ended.failure(), nullptr);
  EXPECT_EQ(ended.state(), Lifecycle::State::kEnded);
}

TEST(Lifecycle, CallsEachSubscriberOnceEvenIfOneThrows) {
  Lifecycle lifecycle({});
  int calls = 0;
  lifecycle.subscribe([](const FailurePtr&) { throw std::runtime_error("a test's"); });
  lifecycle.subscribe([&](const FailurePtr& failure) {
    EXPECT_EQ(failure->cause.how, "x");
    ++calls;
  });
  lifecycle.fail(because("x"));
  lifecycle.fail(because("y"));
  EXPECT_EQ(calls, 1);
}

TEST(Lifecycle, CallsALateSubscriberAtOnce) {
  Lifecycle lifecycle({});
  lifecycle.fail(because("x"));
  int calls = 0;
  EXPECT_EQ(lifecycle.subscribe([&](const FailurePtr&) { ++calls; }), 0U);
  EXPECT_EQ(calls, 1);
}

TEST(Lifecycle, DoesNotCallThoseWhoUnsubscribedNorAnyoneAfterACleanEnd) {
  Lifecycle lifecycle({});
  int calls = 0;
  const auto id = lifecycle.subscribe([&](const FailurePtr&) { ++calls; });
  lifecycle.unsubscribe(id);
  lifecycle.fail(because("x"));
  Lifecycle ended({});
  ended.subscribe([&](const FailurePtr&) { ++calls; });
  ended.end();
  ended.fail(because("x"));
  EXPECT_EQ(ended.subscribe([&](const FailurePtr&) { ++calls; }), 0U);
  EXPECT_EQ(calls, 0);
}

TEST(Lifecycle, ASubscriberMayCallBackIntoIt) {
  Lifecycle lifecycle({});
  bool nested_called = false;
  Lifecycle::Subscription id = 0;
  id = lifecycle.subscribe([&](const FailurePtr&) {
    lifecycle.unsubscribe(id);
    EXPECT_FALSE(lifecycle.fail(because("nested")));
    lifecycle.subscribe([&](const FailurePtr&) { nested_called = true; });
  });
  lifecycle.fail(because("x"));
  EXPECT_TRUE(nested_called);
}

TEST(Lifecycle, OneOfManyConcurrentFailuresWins) {
  Lifecycle lifecycle({});
  std::atomic<int> winners{0};
  std::atomic<int> calls{0};
  lifecycle.subscribe([&](const FailurePtr&) { ++calls; });
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] { winners += lifecycle.fail(because(std::to_string(i))) ? 1 : 0; });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(winners, 1);
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace torchft_ext
