// The end of a member is told to those who wait for it, and to nobody else.
#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "cpp/membership/rendezvous_support.h"

namespace torchft_ext {
namespace {

using namespace rendezvous_test;  // NOLINT(google-build-using-namespace)

TEST_F(RendezvousTest, AFailureRecordOfAnyMemberReachesAllOthersWithItsCause) {
  for (const int quitter : {0, 1, 2}) {
    const std::string prefix = "run" + std::to_string(quitter);
    attempts.clear();
    processes.clear();
    // Rank 3 never comes.
    for (int rank = 0; rank < 3; ++rank) attempts.push_back(addProcess().at(prefix, rank, 4));
    std::atomic<bool> cancel{false};
    auto& leaving = *processes[static_cast<size_t>(quitter)];
    attempts[static_cast<size_t>(quitter)] =
        leaving.at(prefix, quitter, 4, soon(), [&] { return cancel.load(); });
    std::vector<std::future<Outcome>> waiting;
    for (auto& attempt : attempts) waiting.push_back(enter(*attempt));
    EXPECT_TRUE(allHaveLooked());
    cancel = true;
    EXPECT_EQ(failureIn(waiting[static_cast<size_t>(quitter)].get()).kind, FailureKind::kAborted);
    attempts[static_cast<size_t>(quitter)]->publishFailure(
        leaving.failure(FailureKind::kAborted, quitter));
    for (const size_t rank : {0U, 1U, 2U}) {
      if (static_cast<int>(rank) == quitter) continue;
      const Failure failure = failureIn(waiting[rank].get());
      EXPECT_EQ(failure.kind, FailureKind::kAborted);
      EXPECT_EQ(failure.cause.rank, quitter);
      EXPECT_EQ(failure.cause.pid, leaving.self.pid);
      attempts[rank]->publishFailure(failure);
    }
  }
}

// As where a process group's creator fails: the group, with all that it had, is gone at once.
TEST_F(RendezvousTest, AFailureRecordIsReadThoughItsGroupIsGone) {
  prepare(3);
  enterAll();
  attempts[0]->publishFailure(processes[0]->failure(FailureKind::kRendezvous, 0));
  attempts[0].reset();
  // Its answers are deleted at once, behind the failure record.
  EXPECT_TRUE(eventually([&] { return server->size() == 3; }));
  for (const size_t rank : {1U, 2U}) {
    const auto refreshed = refreshedIn(*attempts[rank]);
    ASSERT_TRUE(std::holds_alternative<Failure>(refreshed)) << "rank " << rank;
    EXPECT_EQ(std::get<Failure>(refreshed).kind, FailureKind::kRendezvous);
    EXPECT_EQ(std::get<Failure>(refreshed).cause.pid, processes[0]->self.pid);
  }
}

TEST_F(RendezvousTest, AFailureRecordGoesAtOnceWhenItsGroupHasALaterGeneration) {
  prepare(3);
  enterAll();
  const auto began = Clock::now();
  for (const auto& attempt : attempts) {
    attempt->publishFailure(processes[0]->failure(FailureKind::kAborted, 0));
    attempt->succeeded();
  }
  EXPECT_TRUE(eventually([&] { return server->size() == 0; }));
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(3)) << "it was left to be read";
}

TEST_F(RendezvousTest, ADeathReachesThoseWhoDoNotWatchTheVictim) {
  auto world = std::make_shared<FakeWorld>();
  for (int rank = 0; rank < 3; ++rank) {
    addProcess().world = world;
    attempts.push_back(processes.back()->at("run", rank, 4));  // rank 3 never comes
  }
  std::vector<std::future<Outcome>> waiting;
  for (auto& attempt : attempts) waiting.push_back(enter(*attempt));
  EXPECT_TRUE(allHaveLooked());
  world->set(processes[1]->self.incarnation, Liveness::kGone);
  const Failure first = failureIn(waiting[0].get());
  EXPECT_EQ(first.kind, FailureKind::kPeerLost);
  EXPECT_EQ(first.cause.rank, 1);
  EXPECT_EQ(first.cause.pid, 101);
  attempts[0]->publishFailure(first);
  for (const size_t rank : {1U, 2U}) {
    const Failure told = failureIn(waiting[rank].get());
    EXPECT_EQ(told.kind, FailureKind::kPeerLost);
    EXPECT_EQ(told.cause.pid, 101);
  }
}

TEST_F(RendezvousTest, ADeadLeaderIsNoticedByAllOthers) {
  auto world = std::make_shared<FakeWorld>();
  for (int rank = 0; rank < 3; ++rank) {
    addProcess().world = world;
    attempts.push_back(processes.back()->at("run", rank, 4));
  }
  server->put("run/0", encodeRecord(processes[0]->self));
  std::vector<std::future<Outcome>> waiting;
  for (const size_t rank : {1U, 2U}) waiting.push_back(enter(*attempts[rank]));
  for (const size_t rank : {1U, 2U}) {
    EXPECT_TRUE(eventually([&] { return server->use(processes[rank]->name).looks >= 20; }));
  }
  world->set(processes[0]->self.incarnation, Liveness::kGone);
  for (auto& each : waiting) {
    const Failure failure = failureIn(each.get());
    EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
    EXPECT_EQ(failure.cause.rank, 0);
  }
}

TEST_F(RendezvousTest, AStaleRecordOfADeadProcessWaitsForItsSuccessor) {
  auto world = std::make_shared<FakeWorld>();
  const MemberRecord stale = record(7);
  world->set(stale.incarnation, Liveness::kGone);
  for (const int replaced : {0, 1}) {
    const std::string prefix = "run" + std::to_string(replaced);
    server->put(prefix + "/" + std::to_string(replaced), encodeRecord(stale));
    auto& survivor = addProcess();
    survivor.world = world;
    auto attempt = survivor.at(prefix, 1 - replaced, 3);
    auto waiting = enter(*attempt);
    EXPECT_TRUE(eventually([&] { return server->use(survivor.name).looks >= 20; }));
    auto successor = addProcess().at(prefix, replaced, 3);
    auto third = addProcess().at(prefix, 2, 3);
    auto successor_waits = enter(*successor);
    auto third_waits = enter(*third);
    EXPECT_TRUE(std::holds_alternative<Roster>(waiting.get()));
    EXPECT_TRUE(std::holds_alternative<Roster>(successor_waits.get()));
    EXPECT_TRUE(std::holds_alternative<Roster>(third_waits.get()));
  }
}

TEST_F(RendezvousTest, AnAbortBeforeTheRecordIsWrittenIsToldAllTheSame) {
  auto& waiting = addProcess();
  auto& aborted = addProcess();
  waiting.memory.members = {waiting.self, aborted.self};
  waiting.memory.healthy = true;
  auto leader = waiting.at("run", 0, 2);
  auto entering = enter(*leader);
  auto struck = aborted.at("run", 1, 2, soon(), [] { return true; });
  EXPECT_EQ(failureIn(struck->enter()).kind, FailureKind::kAborted);
  struck->publishFailure(aborted.failure(FailureKind::kAborted, 1));
  const Failure told = failureIn(entering.get());
  EXPECT_EQ(told.kind, FailureKind::kAborted);
  EXPECT_EQ(told.cause.rank, 1);
}

TEST_F(RendezvousTest, ATimeoutNamesTheRankThatWithdrewAndDidNotTryAgain) {
  server->put("run/1", encodeFailureRecord({record(7), {}, {}}));
  auto& process = addProcess();
  const std::string expected =
      "rank 1 did not come: an earlier attempt of its process (host host-7, pid 7) failed, and it "
      "has not tried again";
  EXPECT_EQ(
      messageOfTimeout(expected, [&](Deadline limit) { return process.at("run", 0, 2, limit); }),
      expected);
}

TEST_F(RendezvousTest, ATimeoutSaysWhyTheRankWithdrew) {
  auto& process = addProcess();
  server->put("run/1", encodeFailureRecord(
                           {record(7), {process.failure(FailureKind::kAborted, 1), {}, {}}, {}}));
  const std::string expected =
      "rank 1 did not come: an earlier attempt of its process (host host-7, pid 7) failed, and it "
      "has not tried again: a test said so";
  EXPECT_EQ(
      messageOfTimeout(expected, [&](Deadline limit) { return process.at("run", 0, 2, limit); }),
      expected);
}

TEST_F(RendezvousTest, AFailureRecordFoundInOnesOwnPlaceIsWrittenOver) {
  prepare(2);
  auto follower = enter(*attempts[1]);
  EXPECT_TRUE(eventually([&] { return server->use("p101").looks >= 1; }));
  MemberRecord older = processes[1]->self;
  older.token = Token::random();
  server->put("run/1", encodeFailureRecord({older, {}, {}}));
  EXPECT_TRUE(std::holds_alternative<Roster>(attempts[0]->enter()));
  EXPECT_TRUE(std::holds_alternative<Roster>(follower.get()));
}

TEST_F(RendezvousTest, AnOlderAttemptsEndDoesNotDeleteTheNewerOnesRecord) {
  auto& process = addProcess();
  auto older = process.at("run", 1, 2, Deadline::after(milliseconds(20)));
  older->enter();
  older->publishFailure(process.failure(FailureKind::kTimeout, 1));
  auto newer = process.at("run", 1, 2);
  auto waiting = enter(*newer);
  const std::string bytes = encodeRecord(process.self);
  EXPECT_TRUE(eventually([&] { return server->peek("run/1") == bytes; }));
  older.reset();
  process.store->getAll({"run/1"}, soon(), nullptr);  // after it
  EXPECT_EQ(server->peek("run/1"), bytes);
  auto leader = addProcess().at("run", 0, 2);
  EXPECT_TRUE(std::holds_alternative<Roster>(leader->enter()));
  waiting.get();
}

// A failing member was here for less time than the others need for a look.
TEST_F(RendezvousTest, AFailureRecordReachesThoseWhoHadComeButNeverSawTheRecord) {
  for (const int quitter : {0, 1}) {
    const std::string prefix = "run" + std::to_string(quitter);
    auto& waiting = addProcess();
    auto& leaving = addProcess();
    auto attempt = waiting.at(prefix, 1 - quitter, 3);
    auto shortly = leaving.at(prefix, quitter, 3, Deadline::after(milliseconds(1)));
    const std::string place = prefix + "/" + std::to_string(quitter);
    // The waiting one's record stands, and it has not looked at anything yet.
    server->put(prefix + "/" + std::to_string(1 - quitter), encodeRecord(waiting.self));
    failureIn(shortly->enter());
    shortly->publishFailure(leaving.failure(FailureKind::kPeerLost, quitter));
    leaving.store->getAll({place}, soon(), nullptr);  // after what publishFailure() has begun
    const Failure told = failureIn(attempt->enter());
    EXPECT_EQ(told.kind, FailureKind::kPeerLost);
    EXPECT_EQ(told.cause.rank, quitter);
    EXPECT_EQ(told.cause.pid, leaving.self.pid);
  }
}

// The same prefix, and nobody was there when it ended: the end of another attempt.
TEST_F(RendezvousTest, AFailureRecordDoesNotReachThoseWhoComeAfterIt) {
  for (const int quitter : {0, 1}) {
    const std::string prefix = "run" + std::to_string(quitter);
    auto& leaving = addProcess();
    auto shortly = leaving.at(prefix, quitter, 2, Deadline::after(milliseconds(1)));
    failureIn(shortly->enter());
    shortly->publishFailure(leaving.failure(FailureKind::kPeerLost, quitter));
    leaving.store->getAll({prefix + "/0"}, soon(),
                          nullptr);  // after what publishFailure() has begun
    auto& late = addProcess();
    auto attempt = late.at(prefix, 1 - quitter, 2);
    auto waiting = enter(*attempt);
    EXPECT_TRUE(eventually([&] { return server->use(late.name).looks >= 20; }));
    auto again = leaving.at(prefix, quitter, 2);
    EXPECT_TRUE(std::holds_alternative<Roster>(again->enter()));
    EXPECT_TRUE(std::holds_alternative<Roster>(waiting.get()));
  }
}

}  // namespace
}  // namespace torchft_ext
