#include "comm/watchdog.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>

#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kPatience{30};

std::shared_ptr<Lifecycle> makeLifecycle() {
  auto lifecycle = std::make_shared<Lifecycle>(GenerationIdentity{"dp0", 5, 3, 8});
  lifecycle->activate();
  return lifecycle;
}

std::shared_ptr<OpState> makeOp(const std::shared_ptr<Lifecycle>& lifecycle, Duration timeout,
                                int64_t seq = 1) {
  return std::make_shared<OpState>(lifecycle, OpKind::kBroadcast, seq, timeout);
}

FailurePtr awaitFailure(const std::shared_ptr<Lifecycle>& lifecycle) {
  auto failed = std::make_shared<std::promise<FailurePtr>>();
  lifecycle->subscribe([failed](const FailurePtr& failure) { failed->set_value(failure); });
  auto result = failed->get_future();
  return result.wait_for(kPatience) == std::future_status::ready ? result.get() : nullptr;
}

TEST(Watchdog, FailsTheGenerationOfAnOperationThatRanPastItsDeadline) {
  Watchdog watchdog;
  const auto lifecycle = makeLifecycle();
  const auto op = makeOp(lifecycle, milliseconds(20), 7);
  watchdog.watch(op);
  const FailurePtr failure = awaitFailure(lifecycle);
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kTimeout);
  EXPECT_EQ(failure->op, "broadcast");
  EXPECT_EQ(failure->seq, 7);
  EXPECT_EQ(failure->limit, std::chrono::nanoseconds(milliseconds(20)));
  EXPECT_GE(failure->elapsed, failure->limit);
  EXPECT_EQ(failure->cause.how, "broadcast #7 did not complete within 0.02 s");
  EXPECT_FALSE(op->done());  // its engine has to leave the buffers first
}

TEST(Watchdog, AnEarlierDeadlineThatComesLaterIsKept) {
  Watchdog watchdog;
  const auto patient = makeLifecycle();
  const auto hasty = makeLifecycle();
  const auto long_op = makeOp(patient, std::chrono::hours(1));
  const auto short_op = makeOp(hasty, milliseconds(10));
  watchdog.watch(long_op);
  watchdog.watch(short_op);
  EXPECT_NE(awaitFailure(hasty), nullptr);
  EXPECT_EQ(patient->failure(), nullptr);
}

TEST(Watchdog, LeavesCompletedOperationsAlone) {
  Watchdog watchdog;
  bool in_time = false;  // a machine that stalls is slower than the deadline: then once more
  for (int round = 0; round < 10 && !in_time; ++round) {
    const auto done_generation = makeLifecycle();
    const auto late_generation = makeLifecycle();
    const Deadline soonest = Deadline::after(milliseconds(20));
    const auto done = makeOp(done_generation, milliseconds(20));
    const auto late = makeOp(late_generation, milliseconds(50));
    watchdog.watch(done);
    watchdog.watch(late);
    done->complete(nullptr);
    in_time = !soonest.expired();
    EXPECT_NE(awaitFailure(late_generation), nullptr);  // by now the first deadline has passed, too
    if (in_time) {
      EXPECT_EQ(done_generation->failure(), nullptr);
    }
  }
  EXPECT_TRUE(in_time);
}

TEST(Watchdog, DoesNotKeepOperationsAlive) {
  Watchdog watchdog;
  const auto lifecycle = makeLifecycle();
  auto op = makeOp(lifecycle, std::chrono::hours(1));
  const std::weak_ptr<OpState> alive = op;
  watchdog.watch(op);
  op.reset();
  EXPECT_TRUE(alive.expired());
}

TEST(Watchdog, ForgetsCompletedOperationsLongBeforeTheirDeadline) {
  Watchdog watchdog;
  const auto lifecycle = makeLifecycle();
  for (int64_t seq = 0; seq < 10000; ++seq) {
    const auto op = makeOp(lifecycle, std::chrono::hours(1), seq);
    watchdog.watch(op);
    op->complete(nullptr);
  }
  EXPECT_LE(watchdog.watchedForTest(), 128U);
}

TEST(Watchdog, WhatHasNoDeadlineDoesNotHoldUpWhatHasOne) {
  Watchdog watchdog;
  const auto patient = makeLifecycle();
  const auto hasty = makeLifecycle();
  const auto endless_op = makeOp(patient, Duration(-1));
  const auto short_op = makeOp(hasty, milliseconds(10));
  watchdog.watch(endless_op);
  watchdog.watch(short_op);
  EXPECT_NE(awaitFailure(hasty), nullptr);
  EXPECT_EQ(patient->failure(), nullptr);
}

TEST(Watchdog, TellsTheGenerationsOfUnfinishedOperations) {
  Watchdog watchdog;
  const auto busy = makeLifecycle();
  const auto idle = makeLifecycle();
  const auto first = makeOp(busy, std::chrono::hours(1), 1);
  const auto second = makeOp(busy, Duration(-1), 2);
  const auto done = makeOp(idle, std::chrono::hours(1));
  for (const auto& op : {first, second, done}) watchdog.watch(op);
  done->complete(nullptr);
  EXPECT_EQ(watchdog.outstanding(), std::vector{busy});
  first->complete(nullptr);
  EXPECT_EQ(watchdog.outstanding(), std::vector{busy});
  second->complete(nullptr);
  EXPECT_TRUE(watchdog.outstanding().empty());
}

TEST(Watchdog, StopsWhileDeadlinesAreOutstandingAndIgnoresLaterOnes) {
  Watchdog watchdog;
  const auto lifecycle = makeLifecycle();
  const auto op = makeOp(lifecycle, std::chrono::hours(1));
  watchdog.watch(op);
  EXPECT_TRUE(watchdog.stop(Deadline::after(kPatience)));
  watchdog.watch(op);
  EXPECT_EQ(watchdog.watchedForTest(), 1U);
  EXPECT_EQ(lifecycle->failure(), nullptr);
}

// A generation that asks after so long, and what it is told of.
struct Told {
  explicit Told(Duration ask_after)
      : lifecycle(
            std::make_shared<Lifecycle>(GenerationIdentity{"dp0", 5, 3, 8}, nullptr, ask_after)) {
    lifecycle->listenToWaits([this](const Lifecycle::Operations& operations) {
      MutexLock lock(mutex);
      for (const auto& op : operations) seqs.push_back(op->seq());
    });
  }
  ~Told() { lifecycle->listenToWaits(nullptr); }
  size_t count(int64_t seq) {
    MutexLock lock(mutex);
    return static_cast<size_t>(std::count(seqs.begin(), seqs.end(), seq));
  }

  const std::shared_ptr<Lifecycle> lifecycle;
  Mutex mutex;
  std::vector<int64_t> seqs GUARDED_BY(mutex);
};

TEST(Watchdog, TellsAGenerationOfOperationsThatWaitAgainAndAgainUntilTheyEnd) {
  Told told(milliseconds(20));
  Watchdog watchdog;
  const auto waits = makeOp(told.lifecycle, std::chrono::hours(1), 1);
  const auto ended = makeOp(told.lifecycle, std::chrono::hours(1), 2);
  const auto later = makeOp(told.lifecycle, Duration(-1), 3);
  ended->complete(nullptr);
  for (const auto& op : {waits, ended, later}) watchdog.watch(op);
  EXPECT_TRUE(waitFor([&] { return told.count(1) >= 2 && told.count(3) >= 2; }));
  EXPECT_EQ(told.count(2), 0U);
  EXPECT_EQ(told.lifecycle->failure(), nullptr);
}

TEST(Watchdog, TellsNothingWhereAGenerationDoesNotAsk) {
  Told silent(Duration::zero());
  Told told(milliseconds(20));
  Watchdog watchdog;
  const auto one = makeOp(silent.lifecycle, std::chrono::hours(1), 1);
  const auto other = makeOp(told.lifecycle, std::chrono::hours(1), 2);
  watchdog.watch(one);
  watchdog.watch(other);
  EXPECT_TRUE(waitFor([&] { return told.count(2) >= 2; }));
  EXPECT_EQ(silent.count(1), 0U);
}

TEST(Watchdog, AsksInTimeForAnOperationWhoseLimitIsShort) {
  const auto lifecycle = makeLifecycle();
  const auto op = makeOp(lifecycle, milliseconds(500));
  EXPECT_EQ(op->askAt(), op->issuedAt() + milliseconds(250));
  const auto patient = makeOp(lifecycle, std::chrono::hours(1));
  EXPECT_EQ(patient->askAt(), patient->issuedAt() + kAskAfter);
}

TEST(Watchdog, ATimeoutSaysWhoWasWaitedFor) {
  Watchdog watchdog;
  const auto lifecycle = makeLifecycle();
  const auto op = makeOp(lifecycle, milliseconds(20), 7);
  op->setWaitedFor("rank 2 (host b, pid 8): its last operation is recv #6, 1 s ago", {2});
  watchdog.watch(op);
  const FailurePtr failure = awaitFailure(lifecycle);
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(
      failure->cause.how,
      "broadcast #7 did not complete within 0.02 s: it waited for rank 2 (host b, pid 8): its "
      "last operation is recv #6, 1 s ago");
}

}  // namespace
}  // namespace torchft_ext
