// The peer monitor between real processes: killed, frozen, leaving, cut off. The other process is
// this program, run anew, with orders on its standard input.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "base/mutex.h"
#include "cpp/support/realtime_refusal.h"
#include "cpp/support/sanitizer.h"
#include "cpp/support/wait_for.h"
#include "liveness/peer_monitor.h"

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace torchft_ext {
namespace {

constexpr const char* kVictimVariable = "TORCHFT_EXT_TEST_MONITOR_VICTIM";
constexpr int kReplies = 3;  // the victim's descriptor for what it says
constexpr int kSelfRank = 0;
constexpr int kVictimRank = 1;
constexpr milliseconds kIdleGrace{50};

std::shared_ptr<PeerMonitor> startMonitor(Duration heartbeat_limit) {
  MonitorOptions options;
  options.bind_address = *SocketAddress::fromNumeric("127.0.0.1", 0);
  options.heartbeat_limit = heartbeat_limit;
  options.host = "test";
  options.idle_connection_grace = kIdleGrace;
  std::string error;
  auto monitor = PeerMonitor::start(options, &error);
  if (!monitor) throw std::runtime_error(error);
  return monitor;
}

std::string describe(const MonitoredPeer& peer) {
  return peer.incarnation.hex() + " " + std::to_string(peer.pid) + " " +
         peer.liveness_addresses[0].toString() + " " + peer.liveness_addresses[1].toString();
}

MonitoredPeer readPeer(std::istream& in, int rank) {
  std::string incarnation;
  std::string main;
  std::string backup;
  MonitoredPeer peer;
  in >> incarnation >> peer.pid >> main >> backup;
  peer.rank = rank;
  peer.incarnation = Incarnation::fromHex(incarnation).value();
  peer.host = "test";
  peer.liveness_addresses = {SocketAddress::parse(main).value(),
                             SocketAddress::parse(backup).value()};
  return peer;
}

MonitoredPeer selfRecord(const PeerMonitor& monitor, int rank) {
  return {rank, selfIncarnation(), "test", ::getpid(), monitor.livenessAddresses()};
}

// The other process: one order a line, one reply a line.
class VictimProgram {
 public:
  explicit VictimProgram(Duration heartbeat_limit) : monitor_(startMonitor(heartbeat_limit)) {
    say("record " + describe(selfRecord(*monitor_, kVictimRank)));
  }

  void obeyUntilEndOfOrders() {
    for (std::string line; std::getline(std::cin, line);) {
      std::istringstream order(line);
      std::string word;
      order >> word;
      if (word == "watch") watch(order);
      if (word == "unwatch") watch_.reset();
      if (word == "grow") grow(order);
      if (word == "stop") monitor_->stop(testDeadline());
      say("done");
    }
  }

 private:
  static void say(const std::string& text) {
    const std::string line = text + "\n";
    if (::write(kReplies, line.data(), line.size()) < 0) ::_exit(2);
  }

  void watch(std::istream& order) {
    std::string nonce;
    std::string connector;
    std::string acceptor;
    order >> nonce >> connector >> acceptor;
    GenerationSecret secret;
    secret.connector.bytes = bytesFromHex(connector).value();
    secret.acceptor.bytes = bytesFromHex(acceptor).value();
    watch_ =
        monitor_->watch(Nonce::fromHex(nonce).value(), secret, kVictimRank,
                        {readPeer(order, kSelfRank)}, [](const Failure& failure) {
                          say("failed " + std::to_string(static_cast<int>(failure.kind)) + " " +
                              std::to_string(failure.cause.rank) + " " + failure.cause.how);
                        });
  }

  // Memory that the kernel has to free, page by page, when this process ends.
  static void grow(std::istream& order) {
    size_t mib = 0;
    order >> mib;
    void* memory =
        ::mmap(nullptr, mib << 20U, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) ::_exit(3);
    ::madvise(memory, mib << 20U, MADV_NOHUGEPAGE);
    for (size_t at = 0; at < mib << 20U; at += 4096) static_cast<char*>(memory)[at] = 1;
  }

  const std::shared_ptr<PeerMonitor> monitor_;
  std::unique_ptr<PeerMonitor::Watch> watch_;
};

// Turns this program into the victim before any test runs, if it was started as one.
class BecomeVictim : public ::testing::Environment {
 public:
  void SetUp() override {
    const char* limit = std::getenv(kVictimVariable);
    if (limit == nullptr) return;
    VictimProgram(milliseconds(std::atoi(limit))).obeyUntilEndOfOrders();
    ::_exit(0);
  }
};
const ::testing::Environment* const become_victim =
    ::testing::AddGlobalTestEnvironment(new BecomeVictim);

// This end of the other process. Killed at the latest when this is destroyed.
class Victim {
 public:
  explicit Victim(Duration heartbeat_limit) {
    int orders[2];
    int replies[2];
    if (::pipe2(orders, O_CLOEXEC) != 0 || ::pipe2(replies, O_CLOEXEC) != 0) {
      throw std::runtime_error("no pipes");
    }
    const UniqueFd orders_end(orders[0]);
    const UniqueFd replies_end(replies[1]);
    orders_ = UniqueFd(orders[1]);
    replies_ = UniqueFd(replies[0]);
    spawn(orders_end.get(), replies_end.get(), heartbeat_limit);
    std::istringstream record(hear("record "));
    record_ = readPeer(record, kVictimRank);
  }
  ~Victim() { kill(); }
  Victim(const Victim&) = delete;
  Victim& operator=(const Victim&) = delete;

  const MonitoredPeer& record() const { return record_; }
  pid_t pid() const { return pid_; }

  void order(const std::string& what) {
    const std::string line = what + "\n";
    ASSERT_EQ(::write(orders_.get(), line.data(), line.size()), static_cast<ssize_t>(line.size()));
    hear("done");
  }
  void orderWatch(const Nonce& nonce, const GenerationSecret& secret, const PeerMonitor& monitor) {
    order("watch " + nonce.hex() + " " + hexOf(secret.connector.bytes) + " " +
          hexOf(secret.acceptor.bytes) + " " + describe(selfRecord(monitor, kSelfRank)));
  }
  // The rest of the next reply that begins so; others are kept.
  std::string hear(const std::string& beginning) {
    const Deadline deadline = testDeadline();
    for (;;) {
      for (auto line = heard_.begin(); line != heard_.end(); ++line) {
        if (line->rfind(beginning, 0) != 0) continue;
        std::string rest = line->substr(beginning.size());
        heard_.erase(line);
        return rest;
      }
      if (!listen(deadline)) throw std::runtime_error("the victim did not say: " + beginning);
    }
  }
  bool hasSaid(const std::string& beginning) const {
    return std::any_of(heard_.begin(), heard_.end(),
                       [&](const std::string& line) { return line.rfind(beginning, 0) == 0; });
  }

  // Waits until the kernel has closed its ordinary descriptors.
  Clock::time_point whenItsPipesClosed() {
    while (listen(testDeadline())) {
    }
    EXPECT_TRUE(ended_);
    return Clock::now();
  }

  void signal(int number) const { ::kill(pid_, number); }
  void kill() {
    if (pid_ <= 0) return;
    signal(SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  void spawn(int orders, int replies, Duration heartbeat_limit) {
    const auto ms = std::chrono::duration_cast<milliseconds>(heartbeat_limit).count();
    const std::string victim = std::string(kVictimVariable) + "=" + std::to_string(ms);
    std::vector<char*> environment;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      if (std::string(*entry).rfind("GTEST_", 0) != 0) environment.push_back(*entry);
    }
    environment.push_back(const_cast<char*>(victim.c_str()));
    environment.push_back(nullptr);
    char program[] = "/proc/self/exe";
    char filter[] = "--gtest_filter=PeerMonitorProcesses.*";
    char* arguments[] = {program, filter, nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    // Out of the way first: either may be a descriptor that the other is to become.
    posix_spawn_file_actions_adddup2(&actions, orders, 100);
    posix_spawn_file_actions_adddup2(&actions, replies, 101);
    posix_spawn_file_actions_adddup2(&actions, 100, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, 101, kReplies);
    posix_spawn_file_actions_addclose(&actions, 100);
    posix_spawn_file_actions_addclose(&actions, 101);
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    const int error =
        ::posix_spawn(&pid_, program, &actions, nullptr, arguments, environment.data());
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0) throw std::runtime_error("cannot start the victim");
  }

  bool listen(Deadline deadline) {
    pollfd entry{replies_.get(), POLLIN, 0};
    const auto left = std::chrono::ceil<milliseconds>(deadline.remaining()).count();
    if (::poll(&entry, 1, static_cast<int>(left)) != 1) return false;
    char bytes[512];
    const ssize_t got = ::read(replies_.get(), bytes, sizeof bytes);
    ended_ = got == 0;
    if (got <= 0) return false;
    unread_.append(bytes, static_cast<size_t>(got));
    for (size_t end = unread_.find('\n'); end != std::string::npos; end = unread_.find('\n')) {
      heard_.push_back(unread_.substr(0, end));
      unread_.erase(0, end + 1);
    }
    return true;
  }

  pid_t pid_ = -1;
  UniqueFd orders_;
  UniqueFd replies_;
  bool ended_ = false;
  std::string unread_;
  std::vector<std::string> heard_;
  MonitoredPeer record_;
};

struct Verdict {
  Mutex mutex;
  std::optional<Failure> failure GUARDED_BY(mutex);
  Clock::time_point when GUARDED_BY(mutex);
};

class PeerMonitorProcesses : public ::testing::Test {
 protected:
  // A generation of two: this process and the victim, both connections up.
  void begin(Duration heartbeat_limit) {
    monitor = startMonitor(heartbeat_limit);
    victim = std::make_unique<Victim>(heartbeat_limit);
    beginGeneration();
    ASSERT_TRUE(connectionsBecome(2));
  }
  void beginGeneration() {
    const Nonce nonce = Nonce::random();
    const GenerationSecret secret = GenerationSecret::random();
    verdict = std::make_shared<Verdict>();
    watching = monitor->watch(nonce, secret, kSelfRank, {victim->record()},
                              [shared = verdict](Failure failure) {
                                MutexLock lock(shared->mutex);
                                shared->failure = std::move(failure);
                                shared->when = Clock::now();
                              });
    victim->orderWatch(nonce, secret, *monitor);
  }
  bool connectionsBecome(int count) {
    return waitFor([&] { return monitor->stats().connections == count; });
  }
  std::optional<Failure> failure() {
    MutexLock lock(verdict->mutex);
    return verdict->failure;
  }
  Failure expectFailure() {
    EXPECT_TRUE(waitFor([this] { return failure().has_value(); }));
    return failure().value_or(Failure{});
  }
  Clock::time_point whenToldOf() {
    MutexLock lock(verdict->mutex);
    return verdict->when;
  }

  std::shared_ptr<PeerMonitor> monitor;
  std::unique_ptr<Victim> victim;
  std::shared_ptr<Verdict> verdict;
  std::unique_ptr<PeerMonitor::Watch> watching;
};

constexpr std::chrono::seconds kNoFreeze{3600};

// Ordinary descriptors are closed only after the memory has been freed, some 60 ms per GiB later.
TEST_F(PeerMonitorProcesses, KilledProcessIsNoticedBeforeItsMemoryIsFreed) {
  bool told_first = false;
  // A machine that stalls may lose that much time: then another victim.
  for (int round = 0; round < 5 && !told_first; ++round) {
    watching.reset();
    begin(kNoFreeze);
    victim->order("grow 1024");
    const auto killed = Clock::now();
    victim->signal(SIGKILL);
    const auto closed = victim->whenItsPipesClosed();
    const Failure found = expectFailure();
    EXPECT_EQ(found.kind, FailureKind::kPeerLost);
    EXPECT_EQ(found.cause.rank, kVictimRank);
    EXPECT_EQ(found.cause.pid, victim->pid());
    EXPECT_EQ(found.cause.how, "its process ended");
    const MonitorStats stats = monitor->stats();
    told_first = whenToldOf() < closed || !stats.private_tables;
    std::cout << "death of a process of 1 GiB noticed after "
              << toMilliseconds(whenToldOf() - killed) << " ms, its pipes closed after "
              << toMilliseconds(closed - killed) << " ms (private tables: " << stats.private_tables
              << ", realtime: " << stats.realtime << ")\n";
  }
  EXPECT_TRUE(told_first);
}

TEST_F(PeerMonitorProcesses, ThreadsAreRealtimeWhereTheyMayBe) {
  if (const int refusal = refusalOfRealtime(); refusal != 0) {
    GTEST_SKIP() << "no realtime for this process: " << std::generic_category().message(refusal);
  }
  EXPECT_TRUE(startMonitor(kNoFreeze)->stats().realtime);
}

TEST_F(PeerMonitorProcesses, FrozenProcessIsNoticedToldAndMayJoinAgain) {
  begin(std::chrono::seconds(3));
  victim->signal(SIGSTOP);
  const Failure found = expectFailure();
  EXPECT_EQ(found.kind, FailureKind::kPeerLost);
  EXPECT_NE(found.cause.how.find("(state T: stopped by a signal)"), std::string::npos)
      << found.cause.how;
  victim->signal(SIGCONT);
  const std::string told = victim->hear("failed ");
  EXPECT_EQ(told.rfind("1 1 this process was frozen and left out", 0), 0U) << told;
  beginGeneration();
  EXPECT_TRUE(connectionsBecome(2));
  EXPECT_FALSE(failure().has_value());
}

TEST_F(PeerMonitorProcesses, ProcessThatStopsItsMonitorIsNotHeldForDead) {
  begin(kNoFreeze);
  victim->order("stop");
  EXPECT_TRUE(connectionsBecome(0));
  victim->kill();
  EXPECT_TRUE(monitor->stop(testDeadline()));
  EXPECT_FALSE(failure().has_value());
}

TEST_F(PeerMonitorProcesses, CutConnectionFailsTheGenerationAtBothEndsAndIsMadeAnewForTheNext) {
  begin(kNoFreeze);
  monitor->cutConnectionForTest(victim->record().incarnation);
  EXPECT_EQ(expectFailure().kind, FailureKind::kConnectionLost);
  EXPECT_EQ(victim->hear("failed ").substr(0, 1), "3");
  beginGeneration();
  EXPECT_TRUE(connectionsBecome(2));
  EXPECT_FALSE(failure().has_value());
}

TEST_F(PeerMonitorProcesses, GenerationsThatOverlapShareOneConnection) {
  begin(kNoFreeze);
  const auto first = std::move(watching);
  beginGeneration();
  EXPECT_TRUE(waitFor([this] { return monitor->stats().watches == 2; }));
  EXPECT_EQ(monitor->stats().connections, 2);
  victim->kill();
  EXPECT_EQ(expectFailure().kind, FailureKind::kPeerLost);
}

// ThreadSanitizer knows of one table only: the monitor does not try then.
bool threadMayHaveATableOfItsOwn() {
  if (underThreadSanitizer()) return false;
  bool unshared = false;
  std::thread([&unshared] { unshared = ::unshare(CLONE_FILES) == 0; }).join();
  return unshared;
}

// In the table that this thread shares with all others but those that have one of their own.
size_t sharedSockets() {
  size_t count = 0;
  for (const auto& fd : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(fd.path(), gone).string();
    if (target.rfind("socket:", 0) == 0) ++count;
  }
  return count;
}

TEST_F(PeerMonitorProcesses, ConnectionsLieInPrivateTablesWhereTheKernelHasThem) {
  if (!threadMayHaveATableOfItsOwn()) GTEST_SKIP() << "no private descriptor tables here";
  const size_t before = sharedSockets();
  begin(kNoFreeze);
  EXPECT_TRUE(monitor->stats().private_tables);
  EXPECT_LE(sharedSockets(), before);
}

// Of every thread, since each of the monitor's has a descriptor table of its own.
size_t openDescriptors() {
  size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::error_code gone;
    for ([[maybe_unused]] const auto& fd :
         std::filesystem::directory_iterator(task.path() / "fd", gone)) {
      ++count;
    }
  }
  return count;
}

TEST_F(PeerMonitorProcesses, ManyGenerationsInARowLeaveNothingBehind) {
  begin(kNoFreeze);
  watching.reset();
  victim->order("unwatch");
  ASSERT_TRUE(connectionsBecome(0));
  const size_t before = openDescriptors();
  for (int generation = 0; generation < 200; ++generation) {
    beginGeneration();
    if (generation % 20 == 0) {
      ASSERT_TRUE(connectionsBecome(2));
    }
    if (generation % 40 == 20) watching.reset();
  }
  watching.reset();
  victim->order("unwatch");
  EXPECT_TRUE(connectionsBecome(0));
  EXPECT_TRUE(waitFor([this] { return monitor->stats().watches == 0; }));
  EXPECT_TRUE(waitFor([&] { return openDescriptors() <= before; }))
      << openDescriptors() << " open, " << before << " before";
  EXPECT_FALSE(victim->hasSaid("failed"));
  EXPECT_EQ(monitor->stats().deaths + monitor->stats().lost_connections, 0U);
}

}  // namespace
}  // namespace torchft_ext
