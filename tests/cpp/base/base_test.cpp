// base/: deadlines, identities, the log, threads and task threads.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/fork.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/shortage.h"
#include "base/task_thread.h"
#include "base/threads.h"
#include "base/unique_fd.h"
#include "cpp/support/captured_log.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

// In a child, which it ends: with a limit on address space that leaves so much.
std::string threadsWithSpace(rlim_t left) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    rlim_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit limit{pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + left, RLIM_INFINITY};
    ::setrlimit(RLIMIT_AS, &limit);
    const std::string text = shortageNumbers(EAGAIN);
    const bool written = ::write(ends[1], text.data(), text.size()) > 0;
    ::_exit(written ? 0 : 1);
  }
  ::close(ends[1]);
  std::array<char, 512> text{};
  const ssize_t count = ::read(ends[0], text.data(), text.size());
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  return {text.data(), static_cast<size_t>(std::max<ssize_t>(count, 0))};
}

TEST(Shortage, OfAThreadNamesTheLimitThatWasHit) {
  const std::string of_space = threadsWithSpace(rlim_t{1} << 19U);
  EXPECT_NE(of_space.find("a thread's stack takes"), std::string::npos) << of_space;
  EXPECT_NE(of_space.find("ulimit -v"), std::string::npos) << of_space;
  EXPECT_EQ(of_space.find("ulimit -u"), std::string::npos) << of_space;
  const std::string of_threads = threadsWithSpace(rlim_t{1} << 40U);
  EXPECT_NE(of_threads.find("ulimit -u"), std::string::npos) << of_threads;
  EXPECT_EQ(of_threads.find("ulimit -v"), std::string::npos) << of_threads;
}

bool runs(const std::string& name) {
  const auto names = threadSnapshot().running;
  return std::find(names.begin(), names.end(), name) != names.end();
}

// What a forked child found: 0 if the check held there.
int exitStatusOfChild(const std::function<bool()>& check) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(check() ? 0 : 1);
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

TEST(Deadline, NegativeTimeoutMeansNever) {
  EXPECT_TRUE(Deadline::after(milliseconds(-1)).isNever());
  EXPECT_FALSE(Deadline::never().expired());
  EXPECT_EQ(Deadline::never().remaining(), Duration::max());
}

TEST(Deadline, OverlongTimeoutInAnyUnitMeansNever) {
  EXPECT_TRUE(Deadline::after(Duration::max()).isNever());
  EXPECT_TRUE(Deadline::after(milliseconds::max()).isNever());
  EXPECT_TRUE(Deadline::after(std::chrono::hours(24 * 365 * 293)).isNever());
  EXPECT_FALSE(Deadline::after(std::chrono::hours(24 * 365 * 99)).isNever());
}

TEST(Deadline, OverlongTimesStaySoAsADuration) {
  EXPECT_EQ(durationOf(milliseconds::max()), Duration::max());
  EXPECT_LT(durationOf(milliseconds::min()), Duration::zero());
  EXPECT_EQ(durationOf(milliseconds(5)), Duration(milliseconds(5)));
}

TEST(Deadline, ZeroTimeoutHasExpiredAtOnce) {
  const Deadline deadline = Deadline::after(Duration::zero());
  EXPECT_TRUE(deadline.expired());
  EXPECT_EQ(deadline.remaining(), Duration::zero());
}

TEST(Deadline, TheEarlierOfTwoWins) {
  const Deadline soon = Deadline::after(std::chrono::seconds(1));
  EXPECT_EQ(Deadline::never().orEarlier(soon).at(), soon.at());
  EXPECT_EQ(soon.orEarlier(std::chrono::hours(1)).at(), soon.at());
}

TEST(Identity, HexReadsBack) {
  const Nonce nonce = Nonce::random();
  EXPECT_EQ(nonce.hex().size(), 32U);
  EXPECT_EQ(Nonce::fromHex(nonce.hex()), nonce);
}

TEST(Identity, RefusesMalformedHex) {
  EXPECT_FALSE(Nonce::fromHex(""));
  EXPECT_FALSE(Nonce::fromHex(std::string(31, 'a')));
  EXPECT_FALSE(Nonce::fromHex(std::string(33, 'a')));
  EXPECT_FALSE(Nonce::fromHex(std::string(31, 'a').append("g")));
}

TEST(Identity, RandomOnesDiffer) {
  EXPECT_NE(Nonce::random(), Nonce::random());
  EXPECT_FALSE(Nonce::random().isZero());
  const GenerationSecret secret = GenerationSecret::random();
  EXPECT_NE(secret.connector.bytes, secret.acceptor.bytes);
}

TEST(Identity, ConstantTimeComparisonSeesEveryByte) {
  const auto bytes = randomBytes16();
  EXPECT_TRUE(equalInConstantTime(bytes, bytes));
  for (size_t i = 0; i < bytes.size(); ++i) {
    auto other = bytes;
    other[i] ^= 1U;
    EXPECT_FALSE(equalInConstantTime(bytes, other)) << "byte " << i;
  }
}

TEST(Identity, ProcessKeepsItsIncarnation) {
  EXPECT_EQ(selfIncarnation(), selfIncarnation());
}

TEST(Identity, ForkedChildHasAnotherIncarnation) {
  const Incarnation parent = selfIncarnation();
  const uint64_t fork_count = forkCount();
  EXPECT_EQ(exitStatusOfChild([&] {
              return selfIncarnation() != parent && selfIncarnation() == selfIncarnation() &&
                     forkCount() == fork_count + 1;
            }),
            0);
  EXPECT_EQ(selfIncarnation(), parent);
}

TEST(Log, SinkGetsTheLine) {
  const CapturedLog captured;
  log(LogLevel::kInfo, "generation 3 began");
  EXPECT_TRUE(CapturedLog::contains("generation 3 began"));
}

TEST(Log, LineOfASinkThatThrowsGoesToStderr) {
  setLogSink([](LogLevel, const std::string&) { throw std::runtime_error("no sink"); });
  testing::internal::CaptureStderr();
  log(LogLevel::kInfo, "a line that goes to stderr instead");
  setLogSink(nullptr);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "torchft_ext error: a line that goes to stderr instead\n");
}

// A sink whose reader has stopped reading, until it is let go.
class StuckLog {
 public:
  StuckLog() {
    hold().store(true);
    setLogSink(&StuckLog::take);
  }
  ~StuckLog() { setLogSink(nullptr); }
  StuckLog(const StuckLog&) = delete;
  StuckLog& operator=(const StuckLog&) = delete;

  static std::atomic<bool>& hold() {
    static std::atomic<bool> instance{false};
    return instance;
  }
  static std::atomic<int>& written() {
    static std::atomic<int> instance{0};
    return instance;
  }
  static std::atomic<int>& reports() {
    static std::atomic<int> instance{0};
    return instance;
  }

 private:
  static void take(LogLevel, const std::string& line) {
    // A caller that has to write itself fails the test, and does not hang it.
    const Deadline bounded = Deadline::after(std::chrono::seconds(10));
    while (hold() && !bounded.expired()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ++written();
    if (line.ends_with("lines of the log were dropped here")) ++reports();
  }
};

TEST(Log, SinkThatBlocksHoldsUpNobodyAndWhatIsDroppedIsTold) {
  const StuckLog stuck;
  startLogThread();
  startLogThread();
  for (int i = 0; i < 5000; ++i) {
    log(LogLevel::kInfo, "a line");
    ASSERT_EQ(StuckLog::written(), 0);
  }
  StuckLog::hold() = false;
  EXPECT_TRUE(stopLogThread(Deadline::after(std::chrono::seconds(30))));
  EXPECT_EQ(StuckLog::written(), 1001);  // the thousand that may wait, and the report
  EXPECT_EQ(StuckLog::reports(), 1);
  EXPECT_FALSE(runs("ft-log"));
  log(LogLevel::kInfo, "the caller writes again");
  EXPECT_EQ(StuckLog::written(), 1002);
}

TEST(UniqueFd, ClosesOnceAndMoves) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const UniqueFd reader(ends[0]);
  UniqueFd first(ends[1]);
  UniqueFd second(std::move(first));
  EXPECT_EQ(second.get(), ends[1]);
  second.reset();
  char byte = 0;
  EXPECT_EQ(::read(reader.get(), &byte, 1), 0) << "the writing end is still open";
}

TEST(OwnedThread, BlocksAllSignalsAndHasItsName) {
  std::promise<std::pair<bool, std::string>> seen;
  OwnedThread thread("ft-test-a-name-too-long", [&] {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    std::array<char, 16> name{};
    pthread_getname_np(pthread_self(), name.data(), name.size());
    seen.set_value(
        {sigismember(&mask, SIGINT) == 1 && sigismember(&mask, SIGTERM) == 1, name.data()});
  });
  ASSERT_TRUE(thread.join(testDeadline()));
  const auto [blocked, name] = seen.get_future().get();
  EXPECT_TRUE(blocked);
  EXPECT_EQ(name, "ft-test-a-name-");
}

TEST(OwnedThread, CreatorsSignalMaskIsRestored) {
  OwnedThread thread("ft-test", [] {});
  ASSERT_TRUE(thread.join(testDeadline()));
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  EXPECT_EQ(sigismember(&mask, SIGINT), 0);
}

TEST(OwnedThread, JoinGivesUpAtTheDeadlineAndCanBeRepeated) {
  std::promise<void> release;
  OwnedThread thread("ft-test-join", [&] { release.get_future().wait(); });
  EXPECT_FALSE(thread.join(Deadline::after(milliseconds(5))));
  EXPECT_TRUE(thread.running());
  EXPECT_TRUE(runs("ft-test-join"));
  release.set_value();
  EXPECT_TRUE(thread.join(testDeadline()));
  EXPECT_FALSE(thread.running());
  EXPECT_FALSE(runs("ft-test-join"));
  EXPECT_TRUE(thread.join(testDeadline()));
}

TEST(OwnedThread, KnowsItself) {
  std::promise<OwnedThread*> address;
  std::promise<bool> inside;
  OwnedThread thread("ft-test", [&] { inside.set_value(address.get_future().get()->isSelf()); });
  address.set_value(&thread);
  EXPECT_TRUE(inside.get_future().get());
  EXPECT_FALSE(thread.isSelf());
  EXPECT_TRUE(thread.join(testDeadline()));
}

TEST(OwnedThread, AbandonedOneCountsAsStuckUntilItsBodyReturns) {
  const CapturedLog captured;
  const int before = threadSnapshot().stuck;
  auto release = std::make_shared<std::promise<void>>();
  {
    OwnedThread thread("ft-test-stuck", [release] { release->get_future().wait(); });
    thread.abandon("a test holds it");
    EXPECT_EQ(threadSnapshot().stuck, before + 1);
  }
  EXPECT_TRUE(CapturedLog::contains("a test holds it"));
  release->set_value();
  EXPECT_TRUE(waitFor([&] { return threadSnapshot().stuck == before && !runs("ft-test-stuck"); }));
}

TEST(OwnedThread, DestroyedWithoutJoinItIsAbandoned) {
  const CapturedLog captured;
  auto release = std::make_shared<std::promise<void>>();
  {
    const OwnedThread thread("ft-test-lost", [release] { release->get_future().wait(); });
  }
  EXPECT_TRUE(CapturedLog::contains("ft-test-lost"));
  EXPECT_TRUE(runs("ft-test-lost"));
  release->set_value();
  EXPECT_TRUE(waitFor([] { return !runs("ft-test-lost"); }));
}

TEST(OwnedThread, ExceptionIsLoggedAndEndsTheThreadOnly) {
  const CapturedLog captured;
  OwnedThread thread("ft-test-throws", [] { throw std::runtime_error("a broken body"); });
  EXPECT_TRUE(thread.join(testDeadline()));
  EXPECT_TRUE(CapturedLog::contains("a broken body"));
}

TEST(OwnedThread, ForkedChildNeitherWaitsForNorCountsTheParentsThreads) {
  std::promise<void> release;
  OwnedThread thread("ft-test-fork", [&] { release.get_future().wait(); });
  EXPECT_EQ(exitStatusOfChild([&] {
              return !thread.running() && thread.join(Deadline::never()) &&
                     threadSnapshot().running.empty();
            }),
            0);
  release.set_value();
  EXPECT_TRUE(thread.join(testDeadline()));
}

TEST(TaskThread, RunsTasksInOrderAndAllBeforeItStops) {
  std::vector<int> order;
  TaskThread thread("ft-test-tasks");
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(thread.post([&order, i] { order.push_back(i); }));
  ASSERT_TRUE(thread.stop(testDeadline()));
  ASSERT_EQ(order.size(), 100U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(TaskThread, RefusesTasksOnceStopped) {
  TaskThread thread("ft-test-tasks");
  ASSERT_TRUE(thread.stop(testDeadline()));
  auto alive = std::make_shared<int>(0);
  EXPECT_FALSE(thread.post([alive] {}));
  EXPECT_EQ(alive.use_count(), 1) << "the refused task was kept";
}

TEST(TaskThread, GoesOnAfterATaskThatThrows) {
  const CapturedLog captured;
  std::promise<bool> ran;
  TaskThread thread("ft-test-tasks");
  thread.post([] { throw std::runtime_error("a broken task"); });
  thread.post([&] { ran.set_value(thread.isSelf()); });
  EXPECT_TRUE(ran.get_future().get());
  EXPECT_TRUE(CapturedLog::contains("a broken task"));
}

TEST(TaskThread, DestructorAbandonsATaskThatDoesNotReturn) {
  const CapturedLog captured;
  const int before = threadSnapshot().stuck;
  auto release = std::make_shared<std::promise<void>>();
  {
    TaskThread thread("ft-test-hangs");
    thread.post([release] { release->get_future().wait(); });
  }
  EXPECT_EQ(threadSnapshot().stuck, before + 1);
  release->set_value();
  EXPECT_TRUE(waitFor([&] { return threadSnapshot().stuck == before; }));
}

}  // namespace
}  // namespace torchft_ext
