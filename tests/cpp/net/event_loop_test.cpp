#include "net/event_loop.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <future>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "base/log.h"
#include "cpp/support/realtime_refusal.h"
#include "cpp/support/wait_for.h"
#include "net/private_table.h"
#include "net/socket_address.h"

namespace torchft_ext {
namespace {

UniqueFd readableEvent() {
  return UniqueFd(::eventfd(1, EFD_NONBLOCK | EFD_CLOEXEC));
}

// Runs on the loop and waits; fails the test if the loop does not come to it.
void onLoop(EventLoop& loop, EventLoop::Task task) {
  ASSERT_TRUE(loop.runOnLoop(std::move(task), testDeadline()));
}

// Returns after at least one whole turn that began after the call.
void nextTurn(EventLoop& loop) {
  onLoop(loop, [] {});
  onLoop(loop, [] {});
}

size_t openDescriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

bool hangsUp(int fd) {
  pollfd entry{fd, POLLIN | POLLRDHUP, 0};
  return ::poll(&entry, 1, static_cast<int>(milliseconds(kTestPatience).count())) == 1;
}

// A handler that does not return until it is let go.
struct Hold {
  std::promise<void> entered;
  std::promise<void> release;
  void wait() {
    entered.set_value();
    release.get_future().wait();
  }
};

TEST(EventLoop, RunsTasksOfOneThreadInOrder) {
  EventLoop loop("ft-test-loop");
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(loop.post([&order, i] { order.push_back(i); }));
  onLoop(loop, [] {});
  ASSERT_EQ(order.size(), 1000U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(EventLoop, RunsEveryTaskOfManyThreads) {
  EventLoop loop("ft-test-loop");
  int sum = 0;
  std::vector<std::thread> posters;
  for (int i = 0; i < 4; ++i) {
    posters.emplace_back([&] {
      for (int j = 0; j < 2000; ++j) loop.post([&sum] { ++sum; });
    });
  }
  for (auto& poster : posters) poster.join();
  onLoop(loop, [] {});
  EXPECT_EQ(sum, 8000);
}

TEST(EventLoop, TaskPostedOnTheLoopRuns) {
  EventLoop loop("ft-test-loop");
  std::promise<bool> ran;
  loop.post([&] { loop.post([&] { ran.set_value(loop.inLoop()); }); });
  EXPECT_TRUE(ran.get_future().get());
  EXPECT_FALSE(loop.inLoop());
}

TEST(EventLoop, RunOnLoopRunsAtOnceOnTheLoopItself) {
  EventLoop loop("ft-test-loop");
  bool inner = false;
  onLoop(loop, [&] { loop.runOnLoop([&] { inner = true; }, testDeadline()); });
  EXPECT_TRUE(inner);
}

TEST(EventLoop, RunOnLoopGivesUpAtItsDeadline) {
  EventLoop loop("ft-test-loop");
  Hold hold;
  loop.post([&] { hold.wait(); });
  hold.entered.get_future().wait();
  auto ran = std::make_shared<std::atomic<bool>>(false);
  EXPECT_FALSE(loop.runOnLoop([ran] { *ran = true; }, Deadline::after(milliseconds(5))));
  EXPECT_FALSE(*ran);
  hold.release.set_value();
  EXPECT_TRUE(waitFor([&] { return ran->load(); }));
}

TEST(EventLoop, AcceptedTasksRunBeforeItStops) {
  EventLoop loop("ft-test-loop");
  Hold hold;
  std::atomic<int> ran{0};
  loop.post([&] { hold.wait(); });
  hold.entered.get_future().wait();
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(loop.post([&] { ++ran; }));
  EXPECT_FALSE(loop.stop(Deadline::after(milliseconds(1))));
  hold.release.set_value();
  EXPECT_TRUE(loop.stop(testDeadline()));
  EXPECT_EQ(ran, 10);
}

TEST(EventLoop, RefusesTasksOnceStopped) {
  EventLoop loop("ft-test-loop");
  ASSERT_TRUE(loop.stop(testDeadline()));
  auto alive = std::make_shared<int>(0);
  EXPECT_FALSE(loop.post([alive] {}));
  EXPECT_FALSE(loop.runOnLoop([alive] {}, testDeadline()));
  EXPECT_EQ(alive.use_count(), 1) << "a refused task was kept";
}

TEST(EventLoop, DestructorAbandonsAHandlerThatDoesNotReturn) {
  setLogSink([](LogLevel, const std::string&) {});
  const int before = threadSnapshot().stuck;
  auto hold = std::make_shared<Hold>();
  {
    EventLoop loop("ft-test-stuck");
    loop.post([hold] { hold->wait(); });
    hold->entered.get_future().wait();
  }
  EXPECT_EQ(threadSnapshot().stuck, before + 1);
  hold->release.set_value();
  EXPECT_TRUE(waitFor([&] { return threadSnapshot().stuck == before; }));
  setLogSink(nullptr);
}

TEST(EventLoop, MayBeDestroyedByItsOwnTask) {
  setLogSink([](LogLevel, const std::string&) {});
  auto loop =
      std::make_shared<std::unique_ptr<EventLoop>>(std::make_unique<EventLoop>("ft-test-own-end"));
  EventLoop* raw = loop->get();
  std::promise<void> posted;
  raw->post([loop, &posted] {
    posted.get_future().wait();
    loop->reset();
  });
  posted.set_value();
  EXPECT_TRUE(waitFor([] {
    const auto names = threadSnapshot().running;
    return std::find(names.begin(), names.end(), "ft-test-own-end") == names.end();
  }));
  setLogSink(nullptr);
}

TEST(EventLoop, HandlersEndOnTheLoopsThreadWhenItStops) {
  std::atomic<int> ended_on_loop{0};
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC));
  EventLoop loop("ft-test-loop");
  const auto tellEnd = [&](void* memory) {
    if (loop.inLoop()) ++ended_on_loop;
    delete static_cast<int*>(memory);
  };
  onLoop(loop, [&] {
    loop.watch(fd.get(), EPOLLIN, [guard = std::shared_ptr<int>(new int(0), tellEnd)](uint32_t) {});
    loop.runAt(Clock::now() + std::chrono::hours(1),
               [guard = std::shared_ptr<int>(new int(0), tellEnd)] {});
  });
  ASSERT_TRUE(loop.stop(testDeadline()));
  EXPECT_EQ(ended_on_loop, 2);
}

TEST(EventLoop, CallsTheHandlerOfAReadableDescriptorUntilUnwatched) {
  EventLoop loop("ft-test-loop");
  const UniqueFd fd = readableEvent();
  std::atomic<int> calls{0};
  onLoop(loop, [&] {
    loop.watch(fd.get(), EPOLLIN, [&](uint32_t events) {
      EXPECT_NE(events & EPOLLIN, 0U);
      if (++calls == 3) loop.unwatch(fd.get());
    });
  });
  EXPECT_TRUE(waitFor([&] { return calls == 3; }));
  nextTurn(loop);
  EXPECT_EQ(calls, 3);
}

TEST(EventLoop, ModifyPausesAndResumesAWatch) {
  EventLoop loop("ft-test-loop");
  const UniqueFd fd = readableEvent();
  std::atomic<int> calls{0};
  onLoop(loop, [&] {
    loop.watch(fd.get(), 0, [&](uint32_t) {
      ++calls;
      loop.modify(fd.get(), 0);
    });
  });
  nextTurn(loop);
  EXPECT_EQ(calls, 0);
  onLoop(loop, [&] { loop.modify(fd.get(), EPOLLIN); });
  EXPECT_TRUE(waitFor([&] { return calls == 1; }));
  nextTurn(loop);
  EXPECT_EQ(calls, 1);
  onLoop(loop, [&] { loop.unwatch(fd.get()); });
}

TEST(EventLoop, HandlerThatUnwatchesAnotherSilencesItsFetchedEvent) {
  EventLoop loop("ft-test-loop");
  const UniqueFd first = readableEvent();
  const UniqueFd second = readableEvent();
  int calls = 0;
  onLoop(loop, [&] {
    const auto handler = [&](uint32_t) {
      ++calls;
      loop.unwatch(first.get());
      loop.unwatch(second.get());
    };
    loop.watch(first.get(), EPOLLIN, handler);
    loop.watch(second.get(), EPOLLIN, handler);
  });
  nextTurn(loop);
  onLoop(loop, [&] { EXPECT_EQ(calls, 1); });
}

TEST(EventLoop, StaleEventDoesNotReachANewWatchOfTheSameNumber) {
  EventLoop loop("ft-test-loop");
  std::array<UniqueFd, 2> fds{readableEvent(), readableEvent()};
  int first_calls = 0;
  int second_calls = 0;
  onLoop(loop, [&] {
    // Whichever comes first replaces the other's descriptor by a quiet one under the same number.
    for (size_t i = 0; i < 2; ++i) {
      loop.watch(fds[i].get(), EPOLLIN, [&, i](uint32_t) {
        ++first_calls;
        const int other = fds[1 - i].get();
        loop.unwatch(fds[i].get());
        loop.unwatch(other);
        const UniqueFd quiet(::eventfd(0, EFD_CLOEXEC));
        ASSERT_EQ(::dup2(quiet.get(), other), other);
        loop.watch(other, EPOLLIN, [&](uint32_t) { ++second_calls; });
      });
    }
  });
  nextTurn(loop);
  onLoop(loop, [&] {
    EXPECT_EQ(first_calls, 1);
    EXPECT_EQ(second_calls, 0);
  });
  ASSERT_TRUE(loop.stop(testDeadline()));
}

TEST(EventLoop, WatchOfAClosedDescriptorThrows) {
  EventLoop loop("ft-test-loop");
  bool threw = false;
  onLoop(loop, [&] {
    try {
      loop.watch(1 << 20, EPOLLIN, [](uint32_t) {});
    } catch (const std::system_error&) {
      threw = true;
    }
    loop.unwatch(1 << 20);
  });
  EXPECT_TRUE(threw);
}

TEST(EventLoop, TimersRunInOrderOfTimeAndNotBefore) {
  EventLoop loop("ft-test-loop");
  std::vector<int> order;
  std::promise<void> done;
  const auto start = Clock::now();
  onLoop(loop, [&] {
    loop.runAt(start + milliseconds(30), [&] {
      order.push_back(3);
      EXPECT_GE(Clock::now(), start + milliseconds(30));
      done.set_value();
    });
    loop.runAt(start + milliseconds(10), [&] { order.push_back(1); });
    loop.runAt(start + milliseconds(20), [&] {
      EXPECT_GE(Clock::now(), start + milliseconds(20));
      order.push_back(2);
    });
  });
  done.get_future().wait();
  onLoop(loop, [&] { EXPECT_EQ(order, (std::vector<int>{1, 2, 3})); });
}

TEST(EventLoop, CancelledTimerDoesNotRunEvenIfDue) {
  EventLoop loop("ft-test-loop");
  bool second_ran = false;
  bool third_ran = false;
  onLoop(loop, [&] {
    const auto when = Clock::now();
    auto second = std::make_shared<EventLoop::TimerId>(0);
    loop.runAt(when, [&, second] { loop.cancel(*second); });
    *second = loop.runAt(when, [&] { second_ran = true; });
    loop.runAt(when, [&] { third_ran = true; });
    EXPECT_NE(*second, 0U);
    loop.cancel(987654321);
  });
  EXPECT_TRUE(waitFor([&] {
    bool ran = false;
    loop.runOnLoop([&] { ran = third_ran; }, testDeadline());
    return ran;
  }));
  onLoop(loop, [&] { EXPECT_FALSE(second_ran); });
}

TEST(EventLoop, TimerThatRearmsItselfDoesNotStarveTheLoop) {
  EventLoop loop("ft-test-loop");
  std::atomic<bool> go_on{true};
  std::atomic<int> runs{0};
  std::function<void()> again = [&] {
    ++runs;
    if (go_on) loop.runAt(Clock::time_point::min(), again);
  };
  onLoop(loop, again);
  for (int i = 0; i < 10; ++i) nextTurn(loop);
  EXPECT_GT(runs, 10);
  go_on = false;
  nextTurn(loop);
}

TEST(EventLoop, WhatArrivedBeforeADeadlineIsReadBeforeItIsJudged) {
  EventLoop loop("ft-test-loop");
  std::string order;
  const UniqueFd fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  onLoop(loop, [&] {
    loop.watch(fd.get(), EPOLLIN, [&](uint32_t) {
      order += "data ";
      loop.unwatch(fd.get());
    });
    const auto deadline = Clock::now() + milliseconds(5);
    loop.runAt(deadline, [&] { order += "deadline"; });
    // The loop is busy while both happen: data first, then the deadline passes.
    ::eventfd_write(fd.get(), 1);
    while (Clock::now() < deadline) {
    }
  });
  EXPECT_TRUE(waitFor([&] {
    bool both = false;
    loop.runOnLoop([&] { both = order.find("deadline") != std::string::npos; }, testDeadline());
    return both;
  }));
  onLoop(loop, [&] { EXPECT_EQ(order, "data deadline"); });
}

TEST(EventLoop, ExceptionsOfHandlersTimersAndTasksDoNotEndIt) {
  setLogSink([](LogLevel, const std::string&) {});
  EventLoop loop("ft-test-loop");
  const UniqueFd fd = readableEvent();
  std::atomic<int> thrown{0};
  onLoop(loop, [&] {
    loop.watch(fd.get(), EPOLLIN, [&](uint32_t) {
      loop.unwatch(fd.get());
      ++thrown;
      throw std::runtime_error("handler");
    });
    loop.runAt(Clock::now(), [&] {
      ++thrown;
      throw std::runtime_error("timer");
    });
    ++thrown;
    throw std::runtime_error("task");
  });
  EXPECT_TRUE(waitFor([&] { return thrown == 3; }));
  nextTurn(loop);
  setLogSink(nullptr);
}

TEST(EventLoop, PrivateTableIsUnseenByOthersAndSeesNothingOfTheirs) {
  EventLoop loop("ft-test-private", {.private_table = true});
  constexpr int kOurs = 776;  // high, so that neither table uses the number otherwise
  constexpr int kTheirs = 777;
  const UniqueFd source = readableEvent();
  const UniqueFd ours(::dup2(source.get(), kOurs));
  ASSERT_EQ(::fcntl(kTheirs, F_GETFD), -1);
  bool sees_ours = false;
  onLoop(loop, [&] {
    sees_ours = ::fcntl(ours.get(), F_GETFD) != -1;
    const UniqueFd made = readableEvent();
    EXPECT_EQ(::dup2(made.get(), kTheirs), kTheirs);
  });
  // The one who has no private table (no such kernel, ThreadSanitizer) must say so.
  EXPECT_EQ(sees_ours, !loop.hasPrivateTable());
  EXPECT_EQ(::fcntl(kTheirs, F_GETFD) != -1, !loop.hasPrivateTable());
  onLoop(loop, [] { ::close(kTheirs); });
}

TEST(EventLoop, APrivateTableIsKnownAsLongAsItsThreadLives) {
  const size_t before = threadsWithPrivateTables().size();
  {
    const EventLoop loop("ft-test-private", {.private_table = true});
    EXPECT_EQ(threadsWithPrivateTables().size(), before + (loop.hasPrivateTable() ? 1 : 0));
  }
  EXPECT_TRUE(waitFor([before] { return threadsWithPrivateTables().size() == before; }));
}

TEST(EventLoop, PrivateTableKeepsNoCopyOfOtherDescriptors) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  const UniqueFd near(ends[0]);
  UniqueFd far(ends[1]);
  const EventLoop loop("ft-test-private", {.private_table = true});
  far.reset();
  EXPECT_TRUE(hangsUp(near.get()));
}

TEST(EventLoop, DescriptorsLeftInAPrivateTableCloseWithTheThread) {
  EventLoop loop("ft-test-private", {.private_table = true});
  UniqueFd near;
  int left = -1;
  std::string error;
  const auto listening = listenOn(*SocketAddress::fromNumeric("127.0.0.1", 0), {}, &error);
  ASSERT_TRUE(listening) << error;
  onLoop(loop, [&] { left = startConnect(listening->address, &error).release(); });
  EXPECT_TRUE(waitFor([&] {
    near = acceptOne(listening->fd.get());
    return static_cast<bool>(near);
  }));
  ASSERT_TRUE(loop.stop(testDeadline()));
  if (!loop.hasPrivateTable()) ::close(left);  // then it was everybody's
  EXPECT_TRUE(hangsUp(near.get()));
}

bool thisThreadIsRealtime() {
  return (::sched_getscheduler(0) & ~SCHED_RESET_ON_FORK) == SCHED_FIFO;
}

TEST(EventLoop, SaysWhetherItIsRealtime) {
  for (const bool asked : {true, false}) {
    EventLoop loop("ft-test-realtime", {.realtime = asked});
    bool realtime = false;
    onLoop(loop, [&] { realtime = thisThreadIsRealtime(); });
    EXPECT_EQ(loop.isRealtime(), realtime);
  }
}

TEST(EventLoop, IsRealtimeWhereItAsksForItAndMay) {
  if (const int refusal = refusalOfRealtime(); refusal != 0) {
    GTEST_SKIP() << "no realtime for this process: " << std::generic_category().message(refusal);
  }
  EventLoop loop("ft-test-realtime", {.realtime = true});
  bool realtime = false;
  onLoop(loop, [&] { realtime = thisThreadIsRealtime(); });
  EXPECT_TRUE(realtime);
}

TEST(EventLoop, ManyLoopsLeaveNoDescriptorBehind) {
  { const EventLoop warm_up("ft-test-loop"); }
  const size_t before = openDescriptors();
  for (int i = 0; i < 20; ++i) {
    EventLoop loop("ft-test-loop", {.private_table = i % 2 == 0});
    onLoop(loop, [] {});
  }
  EXPECT_EQ(openDescriptors(), before);
}

TEST(EventLoop, CountsAsStoppedInAForkedChild) {
  auto loop = std::make_unique<EventLoop>("ft-test-loop");
  const pid_t child = ::fork();
  if (child == 0) {
    const bool refused = !loop->post([] {}) && loop->stop(Deadline::never());
    loop.reset();
    ::_exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  onLoop(*loop, [] {});
}

}  // namespace
}  // namespace torchft_ext
