// Members find each other, or learn who is missing or in the way.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "cpp/membership/rendezvous_support.h"

namespace torchft_ext {
namespace {

using namespace rendezvous_test;  // NOLINT(google-build-using-namespace)

class RendezvousOfSize : public RendezvousTest, public testing::WithParamInterface<int> {};

TEST_P(RendezvousOfSize, GivesEveryMemberTheSameRosterByRank) {
  prepare(GetParam());
  const auto outcomes = enterAll();
  for (const Outcome& outcome : outcomes) {
    ASSERT_TRUE(std::holds_alternative<Roster>(outcome)) << std::get<Failure>(outcome).describe();
    const Roster& roster = std::get<Roster>(outcome);
    EXPECT_EQ(roster.nonce, std::get<Roster>(outcomes[0]).nonce);
    EXPECT_EQ(roster.secret, std::get<Roster>(outcomes[0]).secret);
    ASSERT_EQ(roster.members.size(), processes.size());
    for (size_t rank = 0; rank < processes.size(); ++rank) {
      EXPECT_EQ(roster.members[rank].incarnation, processes[rank]->self.incarnation);
    }
  }
}

TEST_P(RendezvousOfSize, LeavesNoKeyBehind) {
  prepare(GetParam());
  enterAll();
  for (auto& attempt : attempts) attempt->succeeded();
  EXPECT_TRUE(eventually([&] { return server->size() == 0; }));
}

TEST_P(RendezvousOfSize, FormsAgainUnderTheSamePrefixWithOtherRanks) {
  prepare(GetParam());
  ASSERT_TRUE(formAll());
  for (int round = 1; round <= 3; ++round) {
    // Records of the last round are still being deleted, and contradict those of this one.
    attempts.clear();
    const int size = static_cast<int>(processes.size());
    for (int rank = 0; rank < size; ++rank) {
      attempts.push_back(
          processes[static_cast<size_t>((rank + round) % size)]->at("run", rank, size));
    }
    ASSERT_TRUE(formAll()) << "round " << round;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, RendezvousOfSize, testing::Values(1, 2, 3, 4, 5, 8));

TEST_F(RendezvousTest, CallsPerProcessAreBoundedAtAnySize) {
  for (const int size : {4, 64}) {
    processes.clear();
    attempts.clear();
    server = std::make_shared<MemoryStore>();
    prepare(size);
    const auto began = Clock::now();
    enterAll();
    const auto waited = static_cast<int>((Clock::now() - began) / milliseconds(5));
    for (int rank = 0; rank < size; ++rank) {
      const StoreUse use = server->use(processes[static_cast<size_t>(rank)]->name);
      EXPECT_EQ(use.clients, 1);
      EXPECT_EQ(use.sets,
                rank == 0 ? size : 1);  // its record; rank 0: and a roster for each of the others
      // Polling: rank 0 reads records one by one too, a few every 15 ms.
      EXPECT_LE(use.looks, 40 + (rank == 0 ? 4 : 2) * waited) << "rank " << rank << " of " << size;
    }
  }
}

// A size that is wrong costs as little as one that is right: what is asked for, and held, grows
// with the members that have come.
TEST_F(RendezvousTest, RankZeroAsksForTwiceAsManyAsHaveCome) {
  constexpr int kHuge = 1 << 16;
  auto& leader = addProcess();
  const auto began = Clock::now();
  const std::string expected = "ranks 1, 2, 3, 4, 5, 6, 7, 8 did not come (and maybe others)";
  EXPECT_EQ(
      messageOfTimeout(expected, [&](Deadline limit) { return leader.at("run", 0, kHuge, limit); }),
      expected);
  const auto waited = static_cast<size_t>((Clock::now() - began) / milliseconds(5));
  constexpr size_t kKey = sizeof("run/12");
  EXPECT_LE(server->use(leader.name).bytes, (100 + waited) * 100 * kKey);
}

TEST_F(RendezvousTest, MoreMembersThanAreAskedForAtFirstFindEachOther) {
  prepare(150);
  for (const Outcome& outcome : enterAll()) {
    ASSERT_TRUE(std::holds_alternative<Roster>(outcome)) << std::get<Failure>(outcome).describe();
    EXPECT_EQ(std::get<Roster>(outcome).members.size(), 150U);
  }
}

TEST_F(RendezvousTest, AMissingRankBeyondThoseAskedForAtFirstIsNamed) {
  auto& leader = addProcess();
  for (int rank = 1; rank < 150; ++rank) {
    if (rank != 130) server->put("run/" + std::to_string(rank), encodeRecord(record(rank)));
  }
  const std::string expected = "rank 130 did not come";
  EXPECT_EQ(
      messageOfTimeout(expected, [&](Deadline limit) { return leader.at("run", 0, 150, limit); }),
      expected);
}

TEST_F(RendezvousTest, AMemberThatComesLastNeedsAHandfulOfCalls) {
  prepare(2);
  auto leader = enter(*attempts[0]);
  ASSERT_TRUE(eventually([&] { return server->use("p100").looks >= 3; }));
  const auto began = Clock::now();
  EXPECT_TRUE(std::holds_alternative<Roster>(attempts[1]->enter()));
  const auto waited = static_cast<int>((Clock::now() - began) / milliseconds(5));
  EXPECT_LE(server->use("p101").calls(), 40 + 2 * waited);
  EXPECT_TRUE(std::holds_alternative<Roster>(leader.get()));
}

TEST_F(RendezvousTest, ATimeoutOfRankZeroNamesTheMissingRanks) {
  std::atomic<bool> cancel{false};
  prepare(5);
  std::vector<std::future<Outcome>> others;
  for (const int rank : {1, 3}) {
    attempts[static_cast<size_t>(rank)] = processes[static_cast<size_t>(rank)]->at(
        "run", rank, 5, soon(), [&] { return cancel.load(); });
    others.push_back(enter(*attempts[static_cast<size_t>(rank)]));
  }
  EXPECT_TRUE(eventually([&] { return server->size() == 2; }));
  const std::string expected = "ranks 2, 4 did not come";
  EXPECT_EQ(messageOfTimeout(expected,
                             [&](Deadline limit) { return processes[0]->at("run", 0, 5, limit); }),
            expected);
  cancel = true;
  for (auto& other : others) EXPECT_EQ(failureIn(other.get()).kind, FailureKind::kAborted);
}

TEST_F(RendezvousTest, ATimeoutOfAFollowerSaysWhetherRankZeroCame) {
  auto& process = addProcess();
  const auto make = [&](Deadline limit) { return process.at("run", 1, 3, limit); };
  const std::string alone = "rank 0 did not come";
  EXPECT_EQ(messageOfTimeout(alone, make), alone);
  server->put("run/0", encodeRecord(record(9)));
  const std::string one_short = "rank 0 sent no roster: rank 2 did not come";
  EXPECT_EQ(messageOfTimeout(one_short, make), one_short);
  server->put("run/2", encodeRecord(record(10)));
  const std::string unanswered = "rank 0 sent no roster: other ranks may not have come to it";
  EXPECT_EQ(messageOfTimeout(unanswered, make), unanswered);
}

// Where the world is too large for everyone to ask for everyone.
TEST_F(RendezvousTest, ATimeoutOfRankZeroTellsTheOthersWhoIsMissing) {
  auto& leader = addProcess();
  auto& follower = addProcess();
  const std::string expected = "ranks 2, 3, 4, 5, 6, 7, 8, 9 did not come (and maybe others)";
  std::string how;
  // A machine that stalls in the last moments costs it the names: then once more.
  for (int round = 0; round < 10 && how.find(expected) == std::string::npos; ++round) {
    const std::string prefix = "run" + std::to_string(round);
    const Deadline limit = Deadline::after(milliseconds(1000));
    auto leading = leader.at(prefix, 0, 200, limit);
    auto following = follower.at(prefix, 1, 200, limit);
    auto ended = std::async(std::launch::async, [&] {
      const Failure failure = failureIn(leading->enter());
      leading->publishFailure(failure);
    });
    const Failure failure = failureIn(following->enter());
    EXPECT_EQ(failure.kind, FailureKind::kTimeout);
    how = failure.cause.how;
    ended.get();
  }
  EXPECT_NE(how.find(expected), std::string::npos) << how;
}

TEST_F(RendezvousTest, AFailedAttemptLeavesNoKeyBehind) {
  addProcess().at("run", 0, 3, Deadline::after(milliseconds(50)))->enter();
  EXPECT_TRUE(eventually([&] { return server->size() == 0; }));
}

TEST_F(RendezvousTest, CancellingEndsTheWaitOfEveryRole) {
  for (const int rank : {0, 1}) {
    std::atomic<bool> cancel{false};
    auto& process = addProcess();
    auto attempt =
        process.at("run" + std::to_string(rank), rank, 3, soon(), [&] { return cancel.load(); });
    auto waiting = enter(*attempt);
    EXPECT_TRUE(eventually([&] { return server->use(process.name).looks >= 1; }));
    cancel = true;
    EXPECT_EQ(failureIn(waiting.get()).kind, FailureKind::kAborted);
  }
}

TEST_F(RendezvousTest, ALostStoreIsNamedAsSuch) {
  prepare(2);
  auto leader = enter(*attempts[0]);
  EXPECT_TRUE(eventually([&] { return server->use("p100").looks >= 1; }));
  server->fail("connection refused");
  const Failure failure = failureIn(leader.get());
  EXPECT_EQ(failure.kind, FailureKind::kStoreLost);
  EXPECT_NE(failure.cause.how.find("connection refused"), std::string::npos) << failure.cause.how;
}

TEST_F(RendezvousTest, TheOtherOwnerOfADuplicateRankIsNamed) {
  prepare(2);
  auto first = enter(*attempts[1]);
  EXPECT_TRUE(eventually([&] { return server->use("p101").looks >= 1; }));
  auto second_attempt = addProcess().at("run", 1, 2);
  auto second = enter(*second_attempt);
  EXPECT_TRUE(eventually([&] { return server->use("p102").looks >= 1; }));
  EXPECT_TRUE(std::holds_alternative<Roster>(attempts[0]->enter()));
  EXPECT_TRUE(std::holds_alternative<Roster>(second.get()));
  const Failure failure = failureIn(first.get());
  EXPECT_EQ(failure.kind, FailureKind::kRendezvous);
  EXPECT_EQ(failure.cause.how,
            "duplicate rank 1: another process (host host-102, pid 102) uses this rank");
  EXPECT_EQ(failure.cause.pid, 102);
}

TEST_F(RendezvousTest, ADuplicateRankIsNoticedThoughRankZeroNeverComes) {
  for (const int rank : {0, 1}) {
    auto& process = addProcess();
    auto attempt = process.at("run" + std::to_string(rank), rank, 3);
    auto waiting = enter(*attempt);
    EXPECT_TRUE(eventually([&] { return server->use(process.name).looks >= 1; }));
    server->put("run" + std::to_string(rank) + "/" + std::to_string(rank), encodeRecord(record(7)));
    const Failure failure = failureIn(waiting.get());
    EXPECT_EQ(failure.kind, FailureKind::kRendezvous);
    EXPECT_TRUE(failure.cause.how.starts_with("duplicate rank")) << failure.cause.how;
  }
}

TEST_F(RendezvousTest, AProcessThatEntersAgainSupersedesItsOlderAttempt) {
  prepare(2);
  auto older = enter(*attempts[1]);
  EXPECT_TRUE(eventually([&] { return server->use("p101").looks >= 1; }));
  auto newer_attempt = processes[1]->at("run", 1, 2);
  auto newer = enter(*newer_attempt);
  EXPECT_TRUE(
      eventually([&] { return server->peek("run/1") == encodeRecord(processes[1]->self); }));
  EXPECT_TRUE(std::holds_alternative<Roster>(attempts[0]->enter()));
  EXPECT_TRUE(std::holds_alternative<Roster>(newer.get()));
  const Failure failure = failureIn(older.get());
  EXPECT_EQ(failure.kind, FailureKind::kRendezvous);
  EXPECT_EQ(failure.cause.how, "this process entered 'run' again as rank 1");
}

TEST_F(RendezvousTest, OneProcessCannotBeTwoRanks) {
  prepare(3);
  server->put("run/1", encodeRecord(processes[1]->self));
  MemberRecord twin = processes[1]->self;
  twin.token = Token::random();
  server->put("run/2", encodeRecord(twin));
  const Failure failure = failureIn(attempts[0]->enter());
  EXPECT_EQ(failure.kind, FailureKind::kRendezvous);
  EXPECT_EQ(failure.cause.how, "ranks 1 and 2 are the same process (host host-101, pid 101)");
}

// Rank 0 asks for the first 64 records alone until all of these are there.
TEST_F(RendezvousTest, OneProcessAsTwoRanksIsNoticedAmongMoreMembersThanAreAskedForAtFirst) {
  auto& leader = addProcess();
  const MemberRecord one = record(1);
  for (int rank = 1; rank < 66; ++rank) {
    MemberRecord own = rank <= 2 ? one : record(rank);
    own.token = Token::random();
    server->put("run/" + std::to_string(rank), encodeRecord(own));
  }
  const auto attempt = leader.at("run", 0, 66, Deadline::after(std::chrono::seconds(20)));
  const Failure failure = failureIn(attempt->enter());
  EXPECT_EQ(failure.kind, FailureKind::kRendezvous);
  EXPECT_EQ(failure.cause.how, "ranks 1 and 2 are the same process (host host-1, pid 1)");
}

TEST_F(RendezvousTest, RanksThatComeForDifferentThingsAreAllToldBoth) {
  for (int rank = 0; rank < 3; ++rank) {
    Process& process = addProcess();
    process.self.purpose = rank == 1 ? "group 'b'" : "group 'a'";
    attempts.push_back(process.at("run", rank, 3));
  }
  auto first = enter(*attempts[1]);
  auto second = enter(*attempts[2]);
  const Failure failure = failureIn(attempts[0]->enter());
  EXPECT_EQ(failure.kind, FailureKind::kRendezvous);
  const std::string both =
      "expected the same on all members: rank 0 (host host-100, pid 100) forms group 'a', and rank "
      "1 "
      "(host host-101, pid 101) forms group 'b'";
  EXPECT_EQ(failure.cause.how, both);
  attempts[0]->publishFailure(failure);
  for (auto* follower : {&first, &second}) {
    const std::string how = failureIn(follower->get()).cause.how;
    EXPECT_NE(how.find(both), std::string::npos) << how;
  }
}

TEST_F(RendezvousTest, AMalformedRecordIsRefusedWithItsRank) {
  prepare(2);
  server->put("run/1", "rubbish");
  const Failure failure = failureIn(attempts[0]->enter());
  EXPECT_EQ(failure.kind, FailureKind::kRendezvous);
  EXPECT_NE(failure.cause.how.find("the record of rank 1 is malformed"), std::string::npos)
      << failure.cause.how;
}

TEST_F(RendezvousTest, ARosterOfAnotherSizeIsRefused) {
  auto& process = addProcess();
  auto attempt = process.at("run", 1, 3);
  const Roster roster{Nonce::random(), GenerationSecret::random(), {record(1), process.self}};
  server->put("run/go/" + process.self.token.hex(), encodeGo(process.self.token, roster));
  const Failure failure = failureIn(attempt->enter());
  EXPECT_EQ(failure.kind, FailureKind::kRendezvous);
  EXPECT_EQ(failure.cause.how, "rank 0 forms a generation of 2 ranks, this rank was given 3");
}

TEST_F(RendezvousTest, ARosterMeantForAnotherTokenIsRefused) {
  auto& process = addProcess();
  auto attempt = process.at("run", 1, 2);
  const Roster roster{Nonce::random(), GenerationSecret::random(), {record(1), process.self}};
  server->put("run/go/" + process.self.token.hex(), encodeGo(Token::random(), roster));
  const Failure failure = failureIn(attempt->enter());
  EXPECT_EQ(failure.kind, FailureKind::kRendezvous);
  EXPECT_NE(failure.cause.how.find("malformed"), std::string::npos) << failure.cause.how;
}

TEST_F(RendezvousTest, ARecordThatWasDeletedLateIsWrittenAgain) {
  prepare(2);
  auto follower = enter(*attempts[1]);
  EXPECT_TRUE(eventually([&] { return server->use("p101").looks >= 1; }));
  server->erase("run/1");
  EXPECT_TRUE(std::holds_alternative<Roster>(attempts[0]->enter()));
  EXPECT_TRUE(std::holds_alternative<Roster>(follower.get()));
}

TEST_F(RendezvousTest, ATimeoutAfterOnesRecordVanishedHintsAtADuplicate) {
  auto& process = addProcess();
  const std::string expected =
      "rank 0 did not come (this rank's record vanished meanwhile: does another process use rank 1 "
      "of 'run' too?)";
  const auto make = [&](Deadline limit) { return process.at("run", 1, 2, limit); };
  std::atomic<bool> over{false};
  std::thread eraser([&] {
    while (!over) {
      server->erase("run/1");
      std::this_thread::yield();
    }
  });
  EXPECT_EQ(messageOfTimeout(expected, make), expected);
  over = true;
  eraser.join();
}

TEST_F(RendezvousTest, RefreshSaysNothingWhileNothingChanges) {
  prepare(2);
  enterAll();
  for (auto& attempt : attempts) {
    EXPECT_TRUE(std::holds_alternative<std::monostate>(attempt->refresh()));
  }
}

TEST_F(RendezvousTest, RankZeroIssuesANewRosterWhenAMemberTriedAgain) {
  prepare(3);
  const auto outcomes = enterAll();
  attempts[1] = processes[1]->at("run", 1, 3);
  auto again = enter(*attempts[1]);
  Roster reissued;
  EXPECT_TRUE(eventually([&] {
    auto refreshed = attempts[0]->refresh();
    const auto* roster = std::get_if<Roster>(&refreshed);
    if (roster != nullptr) reissued = *roster;
    return roster != nullptr;
  }));
  EXPECT_NE(reissued.nonce, std::get<Roster>(outcomes[0]).nonce);
  EXPECT_EQ(std::get<Roster>(again.get()).nonce, reissued.nonce);
  auto bystander = refreshedIn(*attempts[2]);
  ASSERT_TRUE(std::holds_alternative<Roster>(bystander));
  EXPECT_EQ(std::get<Roster>(bystander).nonce, reissued.nonce);
}

// Else rank 0 would miss it for ever, and could issue no roster to who tries again.
TEST_F(RendezvousTest, ARecordThatWasDeletedAfterTheRosterCameIsWrittenAgain) {
  prepare(3);
  const auto outcomes = enterAll();
  server->erase("run/1");
  attempts[2] = processes[2]->at("run", 2, 3);
  auto again = enter(*attempts[2]);
  std::vector<Nonce> nonces(2, std::get<Roster>(outcomes[0]).nonce);
  EXPECT_TRUE(eventually([&] {
    for (size_t rank = 0; rank < nonces.size(); ++rank) {
      const auto refreshed = attempts[rank]->refresh();
      if (const auto* roster = std::get_if<Roster>(&refreshed)) nonces[rank] = roster->nonce;
    }
    return nonces[0] == nonces[1] && nonces[0] != std::get<Roster>(outcomes[0]).nonce;
  }));
  EXPECT_EQ(std::get<Roster>(again.get()).nonce, nonces[0]);
}

TEST_F(RendezvousTest, FormsThoughEachCallToTheStoreTakesLong) {
  prepare(4);
  server->delay(milliseconds(25));  // longer than what is awaited is looked at by default
  for (const auto& outcome : enterAll()) EXPECT_TRUE(std::holds_alternative<Roster>(outcome));
}

// The lender had all the time in the world; this attempt has not.
TEST_F(RendezvousTest, AnAttemptWithAShortLimitDoesNotSpendItInALentClientThatHangs) {
  const std::shared_ptr<StoreClient> lent = server->client("lender");
  Process& process = addProcess();
  const LentClient loan{[weak = std::weak_ptr(lent)] { return weak.lock(); }, kPatience};
  process.store = std::make_shared<StoreThread>("lent", server->factory("own"), loan);
  server->blockNext();
  const auto attempt = process.at("run", 0, 1, Deadline::after(std::chrono::seconds(3)));
  const Outcome outcome = attempt->enter();
  EXPECT_TRUE(std::holds_alternative<Roster>(outcome));
  EXPECT_EQ(server->use("own").clients, 1);
}

TEST_F(RendezvousTest, RefreshNoticesThatTheRankWasTaken) {
  prepare(2);
  enterAll();
  for (const int rank : {0, 1}) {
    server->put("run/" + std::to_string(rank), encodeRecord(record(7)));
    const auto refreshed = refreshedIn(*attempts[static_cast<size_t>(rank)]);
    ASSERT_TRUE(std::holds_alternative<Failure>(refreshed));
    EXPECT_EQ(std::get<Failure>(refreshed).kind, FailureKind::kRendezvous);
  }
}

// The connections may be up meanwhile.
TEST_F(RendezvousTest, RefreshIsNotHeldUpByAStoreThatFreezesAsTheRecordIsWrittenAgain) {
  prepare(2);
  enterAll();
  const Deadline late = Deadline::after(kPatience / 2);
  for (const size_t rank : {0U, 1U}) {
    MemberRecord older = processes[rank]->self;
    older.token = Token::random();
    server->put("run/" + std::to_string(rank), encodeFailureRecord({older, {}, {}}));
    server->blockNextSet();
    EXPECT_TRUE(std::holds_alternative<std::monostate>(attempts[rank]->refresh()));
    server->release();
  }
  server->erase("run/0");
  server->blockNextSet();
  EXPECT_TRUE(std::holds_alternative<std::monostate>(attempts[0]->refresh()));
  EXPECT_FALSE(late.expired());
}

TEST_F(RendezvousTest, TheRecordOfAnotherProcessIsNotDeleted) {
  prepare(2);
  enterAll();
  server->put("run/1", encodeRecord(record(7)));
  attempts[1]->refresh();
  attempts.clear();
  EXPECT_TRUE(eventually([&] { return server->size() == 1; }));
  EXPECT_TRUE(server->peek("run/1"));
}

}  // namespace
}  // namespace torchft_ext
