#include "rendezvous/rendezvous.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <optional>
#include <random>
#include <thread>

#include "fake_vigil.h"
#include "memory_store.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kPatience{60};
using Outcome = std::variant<Roster, Failure>;

Deadline soon() {
  return Deadline::after(kPatience);
}

bool eventually(const std::function<bool()>& condition) {
  const Deadline deadline = soon();
  while (!condition()) {
    if (deadline.expired()) return false;
    std::this_thread::yield();
  }
  return true;
}

MemberRecord record(int pid) {
  MemberRecord made;
  made.incarnation = Incarnation::random();
  made.token = Token::random();
  made.host = "host-" + std::to_string(pid);
  made.pid = pid;
  made.addresses = {*SocketAddress::fromNumeric("10.0.0.1", 4000)};
  made.line_addresses = {*SocketAddress::fromNumeric("::1", 4001),
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
    auto vigil = world ? std::make_unique<FakeVigil>(world) : nullptr;
    return std::make_unique<Rendezvous>(store, prefix, rank, size, self, deadline,
                                        std::move(cancelled), std::exchange(memory, {}),
                                        std::move(vigil));
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
  std::shared_ptr<FakeWorld> world;  // null: its attempts keep no vigil
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

Failure failureIn(Outcome outcome) {
  if (auto* failure = std::get_if<Failure>(&outcome)) return *failure;
  ADD_FAILURE() << "formed an epoch";
  return {};
}

// What a timeout says. A machine that stalls in the last moments costs the message its names: then
// once more.
std::string messageOfTimeout(const std::string& expected,
                             const std::function<std::unique_ptr<Rendezvous>(Deadline)>& make) {
  std::string how;
  for (int round = 0; round < 10 && how != expected; ++round) {
    const Failure failure = failureIn(make(Deadline::after(milliseconds(1000)))->enter());
    EXPECT_EQ(failure.kind, FailureKind::kTimeout);
    how = failure.cause.how;
  }
  return how;
}

TEST(Records, ARecordSurvivesTheRoundTrip) {
  const MemberRecord before = record(7);
  const auto after = decodeRecord(encodeRecord(before));
  ASSERT_TRUE(after);
  EXPECT_EQ(after->incarnation, before.incarnation);
  EXPECT_EQ(after->token, before.token);
  EXPECT_EQ(after->host, before.host);
  EXPECT_EQ(after->pid, before.pid);
  EXPECT_EQ(after->addresses, before.addresses);
  EXPECT_EQ(after->line_addresses, before.line_addresses);
}

TEST(Records, ARosterSurvivesTheRoundTrip) {
  const Roster before{Nonce::random(), EpochSecret::random(), {record(1), record(2), record(3)}};
  const Token token = Token::random();
  const std::string bytes = encodeGo(token, before);
  const auto after = decodeGo(bytes);
  ASSERT_TRUE(after);
  EXPECT_EQ(after->token, token);
  EXPECT_EQ(after->roster.nonce, before.nonce);
  EXPECT_EQ(after->roster.secret, before.secret);
  ASSERT_EQ(after->roster.members.size(), 3U);
  EXPECT_EQ(after->roster.members[2].incarnation, before.members[2].incarnation);
}

TEST(Records, AWithdrawalSurvivesTheRoundTripAndIsNoRecord) {
  Withdrawal before{record(7), {}, {Token::random(), Token::random()}};
  before.ending.failure.kind = FailureKind::kPeerLost;
  before.ending.failure.cause = {2, -1, "host-9", 9, "its process ended"};
  before.ending.origin = Token::random();
  before.ending.culprit = Incarnation::random();
  const std::string bytes = encodeWithdrawal(before);
  const auto after = decodeWithdrawal(bytes);
  ASSERT_TRUE(after);
  EXPECT_EQ(after->member.token, before.member.token);
  EXPECT_EQ(after->ending.failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(after->ending.failure.cause.rank, 2);
  EXPECT_EQ(after->ending.failure.cause.how, "its process ended");
  EXPECT_EQ(after->ending.origin, before.ending.origin);
  EXPECT_EQ(after->ending.culprit, before.ending.culprit);
  EXPECT_EQ(after->meant_for, before.meant_for);
  EXPECT_FALSE(decodeRecord(bytes));
  EXPECT_FALSE(decodeWithdrawal(encodeRecord(before.member)));
  for (size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(decodeWithdrawal(bytes.substr(0, length)));
  EXPECT_FALSE(decodeWithdrawal(bytes + "x"));
}

TEST(Records, TruncatedExtendedAndOversizedBytesAreRefused) {
  const std::string good = encodeRecord(record(7));
  const std::string go =
      encodeGo(Token::random(), {Nonce::random(), EpochSecret::random(), {record(1)}});
  for (size_t length = 0; length < good.size(); ++length)
    EXPECT_FALSE(decodeRecord(good.substr(0, length)));
  for (size_t length = 0; length < go.size(); ++length)
    EXPECT_FALSE(decodeGo(go.substr(0, length)));
  EXPECT_FALSE(decodeRecord(good + "x"));
  EXPECT_FALSE(decodeGo(go + "x"));
  EXPECT_FALSE(decodeRecord(std::string(5000, '\1')));
  EXPECT_FALSE(decodeGo(std::string((size_t{1} << 20) + 1, '\1')));
}

TEST(Records, EveryChangedByteIsSurvived) {
  const std::string go =
      encodeGo(Token::random(), {Nonce::random(), EpochSecret::random(), {record(1), record(2)}});
  for (size_t at = 0; at < go.size(); ++at) {
    for (const char value : {'\0', '\x7f', '\xff'}) {
      std::string changed = go;
      changed[at] = value;
      decodeGo(changed);  // the sanitizers judge
    }
  }
}

TEST(Records, AnEndlessHostNameAndAddressListAreCut) {
  MemberRecord big = record(1);
  big.host = std::string(100000, 'h');
  big.addresses.assign(1000, *SocketAddress::fromNumeric("10.0.0.1", 1));
  const auto after = decodeRecord(encodeRecord(big));
  ASSERT_TRUE(after);
  EXPECT_EQ(after->host.size(), 255U);
  EXPECT_EQ(after->addresses.size(), 16U);
}

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
  const std::string unanswered = "rank 0 sent no roster: other ranks may not have come to it";
  EXPECT_EQ(messageOfTimeout(unanswered, make), unanswered);
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
  const Roster roster{Nonce::random(), EpochSecret::random(), {record(1), process.self}};
  server->put("run/go/" + process.self.token.hex(), encodeGo(process.self.token, roster));
  const Failure failure = failureIn(attempt->enter());
  EXPECT_EQ(failure.kind, FailureKind::kRendezvous);
  EXPECT_EQ(failure.cause.how, "rank 0 forms an epoch of 2 ranks, this rank was given 3");
}

TEST_F(RendezvousTest, ARosterMeantForAnotherTokenIsRefused) {
  auto& process = addProcess();
  auto attempt = process.at("run", 1, 2);
  const Roster roster{Nonce::random(), EpochSecret::random(), {record(1), process.self}};
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
  auto bystander = attempts[2]->refresh();
  ASSERT_TRUE(std::holds_alternative<Roster>(bystander));
  EXPECT_EQ(std::get<Roster>(bystander).nonce, reissued.nonce);
}

TEST_F(RendezvousTest, RefreshNoticesThatTheRankWasTaken) {
  prepare(2);
  enterAll();
  for (const int rank : {0, 1}) {
    server->put("run/" + std::to_string(rank), encodeRecord(record(7)));
    const auto refreshed = attempts[static_cast<size_t>(rank)]->refresh();
    ASSERT_TRUE(std::holds_alternative<Failure>(refreshed));
    EXPECT_EQ(std::get<Failure>(refreshed).kind, FailureKind::kRendezvous);
  }
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

// ---- ends of others while one waits

TEST_F(RendezvousTest, AWithdrawalOfAnyMemberReachesAllOthersWithItsCause) {
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
    attempts[static_cast<size_t>(quitter)]->withdraw(
        leaving.failure(FailureKind::kAborted, quitter));
    for (const size_t rank : {0U, 1U, 2U}) {
      if (static_cast<int>(rank) == quitter) continue;
      const Failure failure = failureIn(waiting[rank].get());
      EXPECT_EQ(failure.kind, FailureKind::kAborted);
      EXPECT_EQ(failure.cause.rank, quitter);
      EXPECT_EQ(failure.cause.pid, leaving.self.pid);
      attempts[rank]->withdraw(failure);
    }
  }
}

// As where a process group's creator fails: the group, with all that it had, is gone at once.
TEST_F(RendezvousTest, AWithdrawalIsReadThoughItsGroupIsGone) {
  prepare(3);
  enterAll();
  attempts[0]->withdraw(processes[0]->failure(FailureKind::kRendezvous, 0));
  attempts[0].reset();
  // Its answers are deleted at once, behind the withdrawal.
  EXPECT_TRUE(eventually([&] { return server->size() == 3; }));
  for (const size_t rank : {1U, 2U}) {
    const auto refreshed = attempts[rank]->refresh();
    ASSERT_TRUE(std::holds_alternative<Failure>(refreshed)) << "rank " << rank;
    EXPECT_EQ(std::get<Failure>(refreshed).kind, FailureKind::kRendezvous);
    EXPECT_EQ(std::get<Failure>(refreshed).cause.pid, processes[0]->self.pid);
  }
}

TEST_F(RendezvousTest, AWithdrawalGoesAtOnceWhenItsGroupHasALaterEpoch) {
  prepare(3);
  enterAll();
  const auto began = Clock::now();
  for (const auto& attempt : attempts) {
    attempt->withdraw(processes[0]->failure(FailureKind::kAborted, 0));
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
  world->set(processes[1]->self.incarnation, Vigil::Sight::kGone);
  const Failure first = failureIn(waiting[0].get());
  EXPECT_EQ(first.kind, FailureKind::kPeerLost);
  EXPECT_EQ(first.cause.rank, 1);
  EXPECT_EQ(first.cause.pid, 101);
  attempts[0]->withdraw(first);
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
  world->set(processes[0]->self.incarnation, Vigil::Sight::kGone);
  for (auto& each : waiting) {
    const Failure failure = failureIn(each.get());
    EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
    EXPECT_EQ(failure.cause.rank, 0);
  }
}

TEST_F(RendezvousTest, AStaleRecordOfADeadProcessWaitsForItsSuccessor) {
  auto world = std::make_shared<FakeWorld>();
  const MemberRecord stale = record(7);
  world->set(stale.incarnation, Vigil::Sight::kGone);
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
  struck->withdraw(aborted.failure(FailureKind::kAborted, 1));
  const Failure told = failureIn(entering.get());
  EXPECT_EQ(told.kind, FailureKind::kAborted);
  EXPECT_EQ(told.cause.rank, 1);
}

TEST_F(RendezvousTest, ATimeoutNamesTheRankThatWithdrewAndDidNotTryAgain) {
  server->put("run/1", encodeWithdrawal({record(7), {}, {}}));
  auto& process = addProcess();
  const std::string expected =
      "rank 1 did not come: an earlier attempt of its process (host host-7, pid 7) failed, and it "
      "has not tried again";
  EXPECT_EQ(
      messageOfTimeout(expected, [&](Deadline limit) { return process.at("run", 0, 2, limit); }),
      expected);
}

TEST_F(RendezvousTest, AWithdrawalFoundInOnesOwnPlaceIsWrittenOver) {
  prepare(2);
  auto follower = enter(*attempts[1]);
  EXPECT_TRUE(eventually([&] { return server->use("p101").looks >= 1; }));
  MemberRecord older = processes[1]->self;
  older.token = Token::random();
  server->put("run/1", encodeWithdrawal({older, {}, {}}));
  EXPECT_TRUE(std::holds_alternative<Roster>(attempts[0]->enter()));
  EXPECT_TRUE(std::holds_alternative<Roster>(follower.get()));
}

TEST_F(RendezvousTest, AnOlderAttemptsEndDoesNotDeleteTheNewerOnesRecord) {
  auto& process = addProcess();
  auto older = process.at("run", 1, 2, Deadline::after(milliseconds(20)));
  older->enter();
  older->withdraw(process.failure(FailureKind::kTimeout, 1));
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

// Who withdraws was here for less time than the others need for a look.
TEST_F(RendezvousTest, AWithdrawalReachesThoseWhoHadComeButNeverSawTheRecord) {
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
    shortly->withdraw(leaving.failure(FailureKind::kPeerLost, quitter));
    leaving.store->getAll({place}, soon(), nullptr);  // after what withdraw() has begun
    const Failure told = failureIn(attempt->enter());
    EXPECT_EQ(told.kind, FailureKind::kPeerLost);
    EXPECT_EQ(told.cause.rank, quitter);
    EXPECT_EQ(told.cause.pid, leaving.self.pid);
  }
}

// The same prefix, and nobody was there when it ended: the end of another attempt.
TEST_F(RendezvousTest, AWithdrawalDoesNotReachThoseWhoComeAfterIt) {
  for (const int quitter : {0, 1}) {
    const std::string prefix = "run" + std::to_string(quitter);
    auto& leaving = addProcess();
    auto shortly = leaving.at(prefix, quitter, 2, Deadline::after(milliseconds(1)));
    failureIn(shortly->enter());
    shortly->withdraw(leaving.failure(FailureKind::kPeerLost, quitter));
    leaving.store->getAll({prefix + "/0"}, soon(), nullptr);  // after what withdraw() has begun
    auto& late = addProcess();
    auto attempt = late.at(prefix, 1 - quitter, 2);
    auto waiting = enter(*attempt);
    EXPECT_TRUE(eventually([&] { return server->use(late.name).looks >= 20; }));
    auto again = leaving.at(prefix, quitter, 2);
    EXPECT_TRUE(std::holds_alternative<Roster>(again->enter()));
    EXPECT_TRUE(std::holds_alternative<Roster>(waiting.get()));
  }
}

// Members that abort at random moments and try again at once, under one prefix.
class Regroup {
 public:
  Regroup(std::vector<std::unique_ptr<Process>>& processes, unsigned seed)
      : processes_(processes), seed_(seed), nonces_(processes.size()), told_(processes.size()) {}

  void run() {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < processes_.size(); ++rank)
      threads.emplace_back([this, rank] { member(rank); });
    for (auto& thread : threads) thread.join();
  }
  // Each abort may be told to every member once.
  void verify() const {
    for (const int told : told_) EXPECT_LE(told, aborts_.load()) << "seed " << seed_;
    EXPECT_FALSE(late_.load()) << "seed " << seed_;
  }

 private:
  bool agreed(size_t rank, const Nonce& nonce) {
    MutexLock lock(mutex_);
    nonces_[rank] = nonce;
    const bool same = std::all_of(nonces_.begin(), nonces_.end(),
                                  [this](const Nonce& each) { return each == nonces_[0]; });
    done_ = done_ || (same && !nonces_[0].isZero());
    return done_;
  }

  // Null: an epoch has formed.
  std::optional<Failure> attempt(size_t rank, Rendezvous& rendezvous, const Cancelled& cancelled) {
    auto outcome = rendezvous.enter();
    for (;;) {
      if (auto* failure = std::get_if<Failure>(&outcome)) return *failure;
      std::variant<std::monostate, Roster, Failure> refreshed;
      while (std::holds_alternative<std::monostate>(refreshed)) {
        if (agreed(rank, std::get<Roster>(outcome).nonce)) return std::nullopt;
        if (cancelled()) return processes_[rank]->failure(FailureKind::kAborted, 0);
        refreshed = rendezvous.refresh();
      }
      if (auto* failure = std::get_if<Failure>(&refreshed)) return *failure;
      outcome = std::get<Roster>(std::move(refreshed));
    }
  }

  void member(size_t rank) {
    std::mt19937 random(seed_ * 31 + static_cast<unsigned>(rank));
    int aborts_left = static_cast<int>(random() % 3);
    std::unique_ptr<Rendezvous> previous;
    Process& process = *processes_[rank];
    const Deadline limit = soon();
    while (!limit.expired()) {
      unsigned patience = aborts_left > 0 ? 1 + random() % 12 : ~0U;
      bool aborted = false;
      const Cancelled cancelled = [&] { return aborted = aborted || --patience == 0; };
      auto rendezvous = process.at("run", static_cast<int>(rank),
                                   static_cast<int>(processes_.size()), soon(), cancelled);
      std::optional<Failure> failure = attempt(rank, *rendezvous, cancelled);
      // The epoch may have formed between this member's last look and now: then nobody else is
      // here.
      if (!failure || agreed(rank, Nonce{})) return;
      ++told_[rank];
      if (aborted) {
        --aborts_left;
        ++aborts_;
        failure = process.failure(FailureKind::kAborted, static_cast<int>(rank));
      }
      process.memory = rendezvous->withdraw(*failure);
      previous = std::move(rendezvous);
    }
    late_ = true;
  }

  std::vector<std::unique_ptr<Process>>& processes_;
  const unsigned seed_;
  Mutex mutex_;
  std::vector<Nonce> nonces_ GUARDED_BY(mutex_);
  bool done_ GUARDED_BY(mutex_) = false;
  std::vector<int> told_;  // each member's own
  std::atomic<int> aborts_{0};
  std::atomic<bool> late_{false};
};

TEST_F(RendezvousTest, RandomAbortsAndRetriesUnderOnePrefixConvergeAndAreToldOnce) {
  for (unsigned seed = 1; seed <= 25; ++seed) {
    processes.clear();
    server = std::make_shared<MemoryStore>();
    for (unsigned i = 0; i < 2 + seed % 4; ++i) addProcess();
    Regroup regroup(processes, seed);
    regroup.run();
    regroup.verify();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace torchft_ext
