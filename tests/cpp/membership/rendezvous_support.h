// What the tests of the rendezvous share: processes that meet in one store in memory.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/membership/fake_member_prober.h"
#include "cpp/membership/memory_store.h"
#include "membership/rendezvous.h"

namespace torchft_ext::rendezvous_test {

inline constexpr std::chrono::seconds kPatience{60};
using Outcome = std::variant<Roster, Failure>;

inline Deadline soon() {
  return Deadline::after(kPatience);
}

inline bool eventually(const std::function<bool()>& condition) {
  const Deadline deadline = soon();
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::yield();
  }
  return true;
}

inline MemberRecord record(int pid) {
  MemberRecord made;
  made.incarnation = Incarnation::random();
  made.token = Token::random();
  made.host = "host-" + std::to_string(pid);
  made.pid = pid;
  made.addresses = {*SocketAddress::fromNumeric("10.0.0.1", 4000)};
  made.liveness_addresses = {*SocketAddress::fromNumeric("::1", 4001),
                             *SocketAddress::fromNumeric("10.0.0.1", 4002)};
  return made;
}

// One process: its own store thread, counted by its name.
struct Process {
  Process(const std::shared_ptr<MemoryStore>& server, int pid)
      : self(record(pid)),
        name("p" + std::to_string(pid)),
        store(std::make_shared<StoreThread>(name, server->factory(name))) {}

  std::unique_ptr<Rendezvous> at(const std::string& prefix, int rank, int size,
                                 Deadline deadline = soon(), Cancelled cancelled = nullptr) {
    self.token = Token::random();
    auto prober = world ? std::make_unique<FakeMemberProber>(world) : nullptr;
    return std::make_unique<Rendezvous>(store, prefix, rank, size, self, deadline,
                                        std::move(cancelled), std::exchange(memory, {}),
                                        std::move(prober));
  }
  Failure failure(FailureKind kind, int rank) const {
    Failure made;
    made.kind = kind;
    made.cause = {rank, -1, self.host, self.pid, "a test said so"};
    return made;
  }

  MemberRecord self;
  std::string name;
  std::shared_ptr<StoreThread> store;
  std::shared_ptr<FakeWorld> world;  // null: its attempts keep no member prober
  AttemptMemory memory;              // for the next attempt
};

struct RendezvousTest : testing::Test {
  std::shared_ptr<MemoryStore> server = std::make_shared<MemoryStore>();
  std::vector<std::unique_ptr<Process>> processes;
  std::vector<std::unique_ptr<Rendezvous>> attempts;

  ~RendezvousTest() override { server->release(); }
  Process& addProcess() {
    processes.push_back(
        std::make_unique<Process>(server, static_cast<int>(processes.size()) + 100));
    return *processes.back();
  }
  // Rank r of `size` is a new process.
  void prepare(int size, const std::string& prefix = "run") {
    for (int rank = 0; rank < size; ++rank) attempts.push_back(addProcess().at(prefix, rank, size));
  }
  std::vector<Outcome> enterAll() {
    std::vector<std::future<Outcome>> entering;
    for (auto& attempt : attempts) {
      entering.push_back(std::async(std::launch::async, [&attempt] { return attempt->enter(); }));
    }
    std::vector<Outcome> outcomes;
    for (auto& each : entering) outcomes.push_back(each.get());
    return outcomes;
  }
  // As an engine does: everyone refreshes until all hold the same roster. False: a member failed.
  bool formAll() {
    Mutex mutex;
    std::vector<Nonce> nonces(attempts.size());
    std::atomic<bool> failed{false};
    const auto agreed = [&] {
      MutexLock lock(mutex);
      const bool same =
          std::all_of(nonces.begin(), nonces.end(), [&](const Nonce& n) { return n == nonces[0]; });
      return same && !nonces[0].isZero();
    };
    const auto run = [&](size_t rank) {
      auto outcome = attempts[rank]->enter();
      while (auto* roster = std::get_if<Roster>(&outcome)) {
        {
          MutexLock lock(mutex);
          nonces[rank] = roster->nonce;
        }
        std::variant<std::monostate, Roster, Failure> refreshed;
        while (std::holds_alternative<std::monostate>(refreshed)) {
          if (agreed() || failed) return;
          refreshed = attempts[rank]->refresh();
        }
        if (auto* next = std::get_if<Roster>(&refreshed))
          outcome = std::move(*next);
        else
          outcome = std::get<Failure>(std::move(refreshed));
      }
      failed = true;
      ADD_FAILURE() << "rank " << rank << ": " << std::get<Failure>(outcome).describe();
    };
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < attempts.size(); ++rank) threads.emplace_back(run, rank);
    for (auto& thread : threads) thread.join();
    return !failed;
  }
  // Everybody has come, and has looked often enough since to have seen the others.
  bool allHaveLooked() {
    std::vector<int> before;
    for (auto& process : processes) {
      if (!eventually([&] { return server->use(process->name).looks >= 1; })) return false;
    }
    for (auto& process : processes) before.push_back(server->use(process->name).looks);
    for (size_t i = 0; i < processes.size(); ++i) {
      const int enough = before[i] + 20;
      if (!eventually([&] { return server->use(processes[i]->name).looks >= enough; }))
        return false;
    }
    return true;
  }
  std::future<Outcome> enter(Rendezvous& attempt) {
    return std::async(std::launch::async, [&attempt] { return attempt.enter(); });
  }
};

inline Failure failureIn(Outcome outcome) {
  if (auto* failure = std::get_if<Failure>(&outcome)) return *failure;
  ADD_FAILURE() << "formed a generation";
  return {};
}

// What refresh() says once it says something. A machine that stalls for a second makes it say
// nothing: then once more.
inline std::variant<std::monostate, Roster, Failure> refreshedIn(Rendezvous& attempt) {
  std::variant<std::monostate, Roster, Failure> refreshed;
  EXPECT_TRUE(eventually([&] {
    refreshed = attempt.refresh();
    return !std::holds_alternative<std::monostate>(refreshed);
  }));
  return refreshed;
}

// What a timeout says. A machine that stalls in the last moments costs the message its names: then
// once more.
inline std::string messageOfTimeout(
    const std::string& expected, const std::function<std::unique_ptr<Rendezvous>(Deadline)>& make) {
  std::string how;
  for (int round = 0; round < 10 && how != expected; ++round) {
    const Failure failure = failureIn(make(Deadline::after(milliseconds(1000)))->enter());
    EXPECT_EQ(failure.kind, FailureKind::kTimeout);
    how = failure.cause.how;
  }
  return how;
}

}  // namespace torchft_ext::rendezvous_test
