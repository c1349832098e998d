#include "comm/callback_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

constexpr CallbackPool::Bounds kFewThreads{.threads = 4};
// Only what waits in CallbackWaits lets others run.
constexpr CallbackPool::Bounds kPatient{.blocked_after = kTestPatience,
                                        .runs_at_most = kTestPatience};

// A gate that tasks wait at.
class Gate {
 public:
  void open() { opened_.set_value(); }
  void waitHere() {
    ++arrived_;
    future_.wait();
    ++passed_;
  }
  void waitLettingOthers() {
    const CallbackWaits waits;
    waitHere();
  }
  bool arrived(int count) {
    return waitFor([&] { return arrived_ >= count; });
  }
  bool passed(int count) {
    return waitFor([&] { return passed_ >= count; });
  }

 private:
  std::promise<void> opened_;
  std::shared_future<void> future_ = opened_.get_future().share();
  std::atomic<int> arrived_{0};
  std::atomic<int> passed_{0};
};

TEST(CallbackPool, RunsTasksInOrderOneAtATime) {
  CallbackPool pool(kPatient);
  std::atomic<int> inside{0};
  std::vector<int> order;  // the turn guards it
  std::promise<void> all;
  for (int i = 0; i < 100; ++i) {
    pool.post([&, i] {
      EXPECT_EQ(++inside, 1);
      order.push_back(i);
      --inside;
      if (i == 99) all.set_value();
    });
  }
  ASSERT_EQ(all.get_future().wait_for(kTestPatience), std::future_status::ready);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(CallbackPool, ATaskThatWaitsLetsTheNextOneRun) {
  CallbackPool pool(kPatient);
  Gate gate;
  pool.post([&] { gate.waitLettingOthers(); });
  pool.post([&] { gate.open(); });
  EXPECT_TRUE(gate.passed(1));
}

TEST(CallbackPool, ATaskThatHasWaitedGoesOnAlone) {
  CallbackPool pool(kPatient);
  Gate gate;
  std::vector<int> order;  // the turn guards it
  std::promise<void> done;
  pool.post([&] {
    gate.waitLettingOthers();
    order.push_back(1);
    done.set_value();
  });
  pool.post([&] {
    gate.open();
    EXPECT_TRUE(gate.passed(1));  // it has woken, and comes back for its turn
    order.push_back(0);
  });
  ASSERT_EQ(done.get_future().wait_for(kTestPatience), std::future_status::ready);
  EXPECT_EQ(order, (std::vector<int>{0, 1}));
}

TEST(CallbackPool, ATaskThatWaitsForSomethingElseLosesItsTurn) {
  CallbackPool pool;
  Gate gate;
  pool.post([&] { gate.waitHere(); });
  pool.post([&] { gate.open(); });
  EXPECT_TRUE(gate.passed(1));
}

TEST(CallbackPool, ATaskThatComputesKeepsItsTurn) {
  CallbackPool pool({.blocked_after = std::chrono::milliseconds(50)});
  std::atomic<bool> computing{false};
  std::promise<bool> alone;
  pool.post([&] {
    computing = true;
    const auto until = Clock::now() + std::chrono::milliseconds(500);
    while (Clock::now() < until) continue;
    computing = false;
  });
  pool.post([&] { alone.set_value(!computing); });
  EXPECT_TRUE(alone.get_future().get());
}

TEST(CallbackPool, ATaskThatComputesForTooLongLosesItsTurn) {
  CallbackPool pool({.runs_at_most = std::chrono::milliseconds(200)});
  std::atomic<bool> stop{false};
  pool.post([&] {
    while (!stop) continue;
  });
  pool.post([&] { stop = true; });
  EXPECT_TRUE(waitFor([&] { return stop.load(); }));
}

TEST(CallbackPool, TellsWhatIsQueuedWhenAllItsThreadsWaitAndRunsItOnMore) {
  CallbackPool pool(kFewThreads);
  Gate gate;
  std::promise<std::string> told;
  for (int i = 0; i < 4; ++i) pool.post([&] { gate.waitLettingOthers(); });
  ASSERT_TRUE(gate.arrived(4));
  pool.post([&] { gate.open(); }, [&](const std::string& why) { told.set_value(why); });
  auto why = told.get_future();
  ASSERT_EQ(why.wait_for(kTestPatience), std::future_status::ready);
  EXPECT_EQ(why.get(),
            "its callbacks found no thread: 4 callbacks of finished operations wait at the same "
            "time in this process");
  EXPECT_TRUE(gate.passed(4));
  EXPECT_EQ(pool.counts().most_threads, 5U);
}

TEST(CallbackPool, TasksThatComeBackFromTheirWaitsDoNotCountAsWaiting) {
  CallbackPool pool({.threads = 4, .blocked_after = kTestPatience, .runs_at_most = kTestPatience});
  Gate waits;
  Gate holds;
  std::atomic<bool> told{false};
  for (int i = 0; i < 3; ++i) pool.post([&] { waits.waitLettingOthers(); });
  ASSERT_TRUE(waits.arrived(3));
  pool.post([&] { holds.waitHere(); });
  ASSERT_TRUE(holds.arrived(1));
  waits.open();
  ASSERT_TRUE(waitFor([&] { return pool.counts().coming_back == 3; }));
  std::promise<void> ran;
  pool.post([&] { ran.set_value(); }, [&](const std::string&) { told = true; });
  holds.open();
  EXPECT_EQ(ran.get_future().wait_for(kTestPatience), std::future_status::ready);
  EXPECT_FALSE(told);
}

TEST(CallbackPool, ThreadsThatWereNeededOnceEnd) {
  CallbackPool pool({.spare_for = std::chrono::milliseconds(20)});
  Gate gate;
  for (int i = 0; i < 8; ++i) pool.post([&] { gate.waitLettingOthers(); });
  ASSERT_TRUE(gate.arrived(8));
  gate.open();
  EXPECT_TRUE(waitFor([&] { return pool.counts().threads == 1; }));
  EXPECT_GE(pool.counts().most_threads, 8U);
}

TEST(CallbackPool, AThrowingTaskLeavesTheNextOneAlive) {
  CallbackPool pool;
  std::promise<void> ran;
  pool.post([] { throw std::runtime_error("a test's"); });
  pool.post([&] { ran.set_value(); });
  EXPECT_EQ(ran.get_future().wait_for(kTestPatience), std::future_status::ready);
}

TEST(CallbackPool, StopRunsWhatIsQueuedAndRefusesWhatComesLater) {
  CallbackPool pool;
  std::atomic<int> ran{0};
  for (int i = 0; i < 10; ++i) pool.post([&] { ++ran; });
  EXPECT_TRUE(pool.stop(testDeadline()));
  EXPECT_EQ(ran, 10);
  EXPECT_FALSE(pool.post([&] { ++ran; }));
  EXPECT_EQ(pool.counts().threads, 0U);
}

TEST(CallbackPool, StopEndsAtItsDeadlineWhereATaskDoesNotReturn) {
  CallbackPool pool;
  Gate gate;
  std::promise<bool> from_inside;
  pool.post([&] { from_inside.set_value(pool.stop(testDeadline())); });
  EXPECT_FALSE(from_inside.get_future().get()) << "it would wait for itself";
  pool.post([&] { gate.waitHere(); });
  ASSERT_TRUE(gate.arrived(1));
  EXPECT_FALSE(pool.stop(Deadline::after(std::chrono::milliseconds(20))));
  gate.open();
  EXPECT_TRUE(pool.stop(testDeadline()));
}

TEST(CallbackPool, ManyTasksThatWaitForEachOtherFromManyThreads) {
  CallbackPool pool;
  std::atomic<int> done{0};
  std::vector<std::thread> posters;
  for (int poster = 0; poster < 4; ++poster) {
    posters.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        auto inner = std::make_shared<std::promise<void>>();
        pool.post([&, inner] {
          {
            const CallbackWaits waits;
            inner->get_future().wait();
          }
          ++done;
        });
        pool.post([inner] { inner->set_value(); });
        while (pool.counts().threads > 32) std::this_thread::yield();
      }
    });
  }
  for (auto& poster : posters) poster.join();
  EXPECT_TRUE(waitFor([&] { return done == 200; }));
}

}  // namespace
}  // namespace torchft_ext
