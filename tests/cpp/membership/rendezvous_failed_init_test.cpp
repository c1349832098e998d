// A member that cannot take part, or ends before others have come, is told to those who come later.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>

#include "cpp/membership/rendezvous_support.h"

namespace torchft_ext {
namespace {

using namespace rendezvous_test;  // NOLINT(google-build-using-namespace)

// publishFailedInit() whose readers may come as late as a machine that stalls makes them.
void publishPatiently(Rendezvous& attempt, const Failure& why) {
  attempt.publishFailedInit(why, kPatience);
}

TEST_F(RendezvousTest, AMemberThatCannotTakePartIsToldToThoseWhoComeAfterIt) {
  for (const size_t absent : {0U, 1U}) {
    attempts.clear();
    processes.clear();
    server = std::make_shared<MemoryStore>();
    prepare(3);
    const Process& missing = *processes[absent];
    const Failure why = missing.failure(FailureKind::kRendezvous, static_cast<int>(absent));
    auto publishing =
        std::async(std::launch::async, [&] { publishPatiently(*attempts[absent], why); });
    EXPECT_TRUE(eventually([&] { return server->size() == 1; }));
    std::vector<Rendezvous*> others;
    std::vector<std::future<Outcome>> waiting;
    for (auto& attempt : attempts) {
      if (attempt == attempts[absent]) continue;
      others.push_back(attempt.get());
      waiting.push_back(enter(*attempt));
    }
    EXPECT_TRUE(eventually([&] { return server->size() == 3; }));
    for (size_t i = 0; i < others.size(); ++i) {
      const Failure failure = failureIn(waiting[i].get());
      EXPECT_EQ(failure.kind, FailureKind::kRendezvous);
      EXPECT_EQ(failure.cause.pid, missing.self.pid);
      others[i]->publishFailure(failure);
    }
    publishing.get();
  }
}

// What stands in the two places is of an earlier run: its processes are gone.
TEST_F(RendezvousTest, AMemberThatCannotTakePartIsToldInAStoreWithLeftovers) {
  const MemberRecord dead = record(7);
  for (const std::string& left : {encodeRecord(dead), encodeFailureRecord({dead, {}, {}})}) {
    attempts.clear();
    processes.clear();
    server = std::make_shared<MemoryStore>();
    prepare(2);
    server->put("run/0", encodeRecord(record(8)));
    server->put("run/1", left);
    const Failure why = processes[1]->failure(FailureKind::kRendezvous, 1);
    auto publishing = std::async(std::launch::async, [&] { publishPatiently(*attempts[1], why); });
    EXPECT_TRUE(eventually([&] { return server->use("p101").looks >= 20; }));
    const Failure failure = failureIn(attempts[0]->enter());
    EXPECT_EQ(failure.cause.pid, processes[1]->self.pid) << failure.describe();
    attempts[0]->publishFailure(failure);
    publishing.get();
  }
}

// As where a connection waits for a name server: the time for the readers begins after that.
TEST_F(RendezvousTest, AMemberThatCannotTakePartIsToldThoughTheStoreIsSlowToAnswer) {
  prepare(2);
  server->blockNext();
  auto publishing = std::async(std::launch::async, [&] {
    attempts[1]->publishFailedInit(processes[1]->failure(FailureKind::kRendezvous, 1));
  });
  const auto late = Rendezvous::kReadersComeWithin + milliseconds(200);
  EXPECT_EQ(publishing.wait_for(late), std::future_status::timeout);
  server->release();
  const Failure failure = failureIn(attempts[0]->enter());
  EXPECT_EQ(failure.cause.pid, processes[1]->self.pid) << failure.describe();
  attempts[0]->publishFailure(failure);
  publishing.get();
}

// Its process may end without finishing what was to be done in the background.
TEST_F(RendezvousTest, AMemberThatCannotTakePartReturnsWhenItsReaderHasRead) {
  prepare(2);
  auto waiting = enter(*attempts[0]);
  EXPECT_TRUE(eventually([&] { return server->peek("run/0").has_value(); }));
  server->delay(milliseconds(20));
  auto publishing = std::async(std::launch::async, [&] {
    publishPatiently(*attempts[1], processes[1]->failure(FailureKind::kRendezvous, 1));
    return decodeFailureRecord(server->peek("run/1").value_or(""));
  });
  const Failure failure = failureIn(waiting.get());
  attempts[0]->publishFailure(failure);
  const auto left = publishing.get();
  ASSERT_TRUE(left);
  EXPECT_EQ(left->meant_for, std::vector<Token>{processes[0]->self.token});
}

TEST_F(RendezvousTest, AMemberThatIsInterruptedWhileItTellsLeavesItsFailureRecord) {
  std::atomic<bool> interrupt{false};
  auto& process = addProcess();
  auto attempt = process.at("run", 1, 2, soon(), [&] {
    if (interrupt) throw std::runtime_error("a signal's handler says so");
    return false;
  });
  const Failure why = process.failure(FailureKind::kRendezvous, 1);
  auto publishing = std::async(std::launch::async, [&] { publishPatiently(*attempt, why); });
  EXPECT_TRUE(eventually([&] { return server->peek("run/1").has_value(); }));
  interrupt = true;
  EXPECT_THROW(publishing.get(), std::runtime_error);
  attempt.reset();
  process.store->getAll({"run/1"}, soon(), nullptr);  // after what its end has begun
  EXPECT_TRUE(decodeFailureRecord(server->peek("run/1").value_or("")));
}

TEST_F(RendezvousTest, AMemberThatCannotTakePartGivesWayToOneThatTakesItsPlace) {
  auto& process = addProcess();
  auto attempt = process.at("run", 1, 2);
  const Failure why = process.failure(FailureKind::kRendezvous, 1);
  auto publishing = std::async(std::launch::async, [&] { publishPatiently(*attempt, why); });
  EXPECT_TRUE(eventually([&] { return server->peek("run/1").has_value(); }));
  const std::string successor = encodeRecord(record(7));
  EXPECT_TRUE(eventually([&] { return server->use(process.name).looks >= 20; }));
  server->put("run/1", successor);
  publishing.get();
  EXPECT_EQ(server->peek("run/1"), successor);
}

// Rank 2's only reader is rank 0, which passes its end on. Rank 1 comes when it has done so.
TEST_F(RendezvousTest, AnEndInTheFirstGenerationReachesThoseWhoComeAfterRankZeroWasTold) {
  prepare(3);
  auto publishing = std::async(std::launch::async, [&] {
    publishPatiently(*attempts[2], processes[2]->failure(FailureKind::kRendezvous, 2));
  });
  const Failure first = failureIn(attempts[0]->enter());
  attempts[0]->publishFailure(first);
  auto telling =
      std::async(std::launch::async, [&] { attempts[0]->awaitReaders(soon(), nullptr); });
  publishing.get();
  processes[0]->store->getAll({"run/0"}, soon(), nullptr);  // after what publishFailure() has begun
  const Failure told = failureIn(attempts[1]->enter());
  EXPECT_EQ(told.kind, FailureKind::kRendezvous);
  EXPECT_EQ(told.cause.pid, processes[2]->self.pid);
  attempts[1]->publishFailure(told);
  telling.get();
}

// As for one whose own end it is, and for one that had a generation before.
TEST_F(RendezvousTest, OnlyAnothersEndInTheFirstGenerationIsHeldUpForThoseWhoMayCome) {
  auto& leader = addProcess();
  auto& other = addProcess();
  const Deadline late = Deadline::after(kPatience / 2);
  struct Case {
    FailureKind kind;
    int rank;
    std::vector<MemberRecord> members;  // of the last generation
  };
  for (const Case& each : {Case{FailureKind::kAborted, 0, {}}, Case{FailureKind::kTimeout, 1, {}},
                           Case{FailureKind::kStoreLost, 1, {}},
                           Case{FailureKind::kAborted, 1, {leader.self, other.self}}}) {
    leader.memory.members = each.members;
    auto attempt = leader.at("run", 0, 3, soon(), [] { return true; });
    failureIn(attempt->enter());
    const Process& culprit = each.rank == 0 ? leader : other;
    attempt->publishFailure(culprit.failure(each.kind, each.rank));
    attempt->awaitReaders(soon(), nullptr);
  }
  EXPECT_FALSE(late.expired());
}

TEST_F(RendezvousTest, AMemberWhosePlaceIsTakenTellsNothingThere) {
  prepare(3);
  auto entering = enter(*attempts[0]);
  EXPECT_TRUE(eventually([&] { return server->peek("run/0").has_value(); }));
  const std::string taken = encodeRecord(record(7));
  server->put("run/0", taken);
  failureIn(entering.get());
  attempts[0]->publishFailure(processes[2]->failure(FailureKind::kPeerLost, 2));
  const Deadline late = Deadline::after(kPatience / 2);
  attempts[0]->awaitReaders(soon(), nullptr);
  EXPECT_FALSE(late.expired());
  processes[0]->store->getAll({"run/0"}, soon(), nullptr);
  EXPECT_EQ(server->peek("run/0"), taken);
}

}  // namespace
}  // namespace torchft_ext
