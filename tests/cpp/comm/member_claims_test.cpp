// Several members of one process: which one goes where, and their lives.
#include "comm/member_claims.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/member_incarnation.h"
#include "base/threads.h"
#include "cpp/comm/around_engine.h"
#include "cpp/comm/cluster.h"
#include "cpp/support/wait_for.h"
#include "host/shared_processes.h"

namespace torchft_ext {
namespace {

std::shared_ptr<Lifecycle> attempt() {
  return std::make_shared<Lifecycle>(GenerationIdentity{});
}

TEST(MemberClaims, OneRankOfAPlaceIsMemberZeroHoweverOftenItComes) {
  const auto first = attempt();
  const auto second = attempt();
  EXPECT_EQ(claimMember("one rank", 3, std::nullopt, first), 0);
  EXPECT_EQ(claimMember("one rank", 3, std::nullopt, second), 0);
  EXPECT_EQ(claimMember("elsewhere", 4, std::nullopt, second), 0);
}

TEST(MemberClaims, RanksOfOnePlaceAreDifferentMembers) {
  const std::vector<std::shared_ptr<Lifecycle>> attempts{attempt(), attempt(), attempt()};
  std::vector<int> members;
  for (int i = 0; i < 3; ++i)
    members.push_back(claimMember("three", 2 - i, std::nullopt, attempts[static_cast<size_t>(i)]));
  EXPECT_EQ(members, (std::vector<int>{0, 1, 2}));
}

TEST(MemberClaims, AGroupKeepsItsMemberWhereNoOtherRankHasIt) {
  const auto one = attempt();
  const auto other = attempt();
  EXPECT_EQ(claimMember("kept", 0, 2, one), 2);
  EXPECT_EQ(claimMember("kept", 1, 2, other), 0);
}

TEST(MemberClaims, AClaimEndsWithItsAttempt) {
  auto gone = attempt();
  const auto failed = attempt();
  claimMember("over", 0, std::nullopt, gone);
  claimMember("over", 1, std::nullopt, failed);
  gone.reset();
  failed->fail(failed->ownFailure(FailureKind::kAborted, "a test"));
  const auto next = attempt();
  EXPECT_EQ(claimMember("over", 2, std::nullopt, next), 0);
}

TEST(MemberIncarnations, ThoseOfOneProcessHaveOneHalfInCommon) {
  const Incarnation one = newMemberIncarnation();
  const Incarnation other = newMemberIncarnation();
  EXPECT_NE(one, other);
  EXPECT_EQ(processPartOf(one), processPartOf(selfIncarnation()));
  EXPECT_EQ(processPartOf(one), processPartOf(other));
  EXPECT_NE(processPartOf(one), processPartOf(Incarnation::random()));
}

TEST(SharedProcesses, ALossNamesTheOtherRanksOfItsProcessOnce) {
  Roster roster;
  for (int rank = 0; rank < 5; ++rank) {
    MemberRecord record;
    record.incarnation = rank % 2 == 0 ? newMemberIncarnation() : Incarnation::random();
    roster.members.push_back(std::move(record));
  }
  const SharedProcesses shared(roster);
  Failure loss;
  loss.kind = FailureKind::kPeerLost;
  loss.cause = {2, -1, "host", 1, "its process ended"};
  shared.nameIn(loss);
  shared.nameIn(loss);
  EXPECT_EQ(loss.cause.how, "its process ended; ranks 0, 4 were the same process");
  loss.cause = {1, -1, "host", 1, "its process ended"};
  shared.nameIn(loss);
  EXPECT_EQ(loss.cause.how, "its process ended");
}

// Groups over the engines of this process, as programs have them.
struct Ranks {
  // one_store: false: nobody can tell that their stores are one.
  explicit Ranks(size_t count, bool one_store = true) {
    const auto engine = std::get<std::shared_ptr<Engine>>(hostEngine(loopbackOptions()));
    for (size_t i = 0; i < count; ++i) {
      groups.push_back(std::make_unique<Group>("rank", engine, watchdog, kTestLimit));
      const std::string key = one_store ? "memory" : "memory " + std::to_string(i);
      stores.push_back(
          std::make_shared<StoreThread>(key, [data = data] { return data->client(); }));
    }
  }
  ~Ranks() {
    groups.clear();
    EXPECT_TRUE(stopHostEngines(Deadline::after(kTestLimit)));
  }
  std::vector<FailurePtr> configure(const std::string& prefix) {
    std::vector<FailurePtr> failures(groups.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < groups.size(); ++rank) {
      threads.emplace_back([this, rank, &prefix, &failures] {
        failures[rank] = groups[rank]->configure(stores[rank], prefix, static_cast<int>(rank),
                                                 static_cast<int>(groups.size()), kTestLimit);
      });
    }
    for (auto& thread : threads) thread.join();
    return failures;
  }
  std::vector<FailurePtr> sum() {
    std::vector<std::vector<float>> values(groups.size(), std::vector<float>(1000, 1));
    std::vector<std::shared_ptr<OpState>> states;
    for (size_t rank = 0; rank < groups.size(); ++rank)
      states.push_back(groups[rank]->issue(allreduceOf(values[rank])));
    std::vector<FailurePtr> failures;
    for (const auto& state : states) failures.push_back(finish(state));
    for (const auto& sum : values) {
      if (!failures.front()) {
        EXPECT_EQ(sum.front(), static_cast<float>(groups.size()));
      }
    }
    return failures;
  }

  std::shared_ptr<MemoryStore> data = std::make_shared<MemoryStore>();
  std::shared_ptr<Watchdog> watchdog = std::make_shared<Watchdog>();
  std::vector<std::shared_ptr<StoreThread>> stores;
  std::vector<std::unique_ptr<Group>> groups;
};

// An engine whose process has no room for another member.
class FullEngine : public AroundEngine {
 public:
  using AroundEngine::AroundEngine;
  std::variant<std::shared_ptr<Engine>, Failure> forMember(int /*member*/) override {
    Failure full;
    full.kind = FailureKind::kRendezvous;
    full.cause.how = "cannot listen";
    return full;
  }
  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override {
    return inner_->form(roster, std::move(lifecycle), deadline, superseded);
  }
};

TEST(MembersOfAProcess, TellTheOthersThatThereIsNoRoomForOneMore) {
  Ranks ranks(2);
  const auto full = std::make_shared<FullEngine>(ranks.groups[0]->engine());
  for (auto& group : ranks.groups)
    group = std::make_unique<Group>("rank", full, ranks.watchdog, kTestLimit);
  for (const auto& failure : ranks.configure("full")) {
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kRendezvous) << failure->describe();
    EXPECT_NE(failure->cause.how.find("cannot listen"), std::string::npos) << failure->describe();
  }
}

TEST(MembersOfAProcess, AllHearThatTheyAreOneProcessWhereTheirStoresCannotBeToldToBeOne) {
  Ranks ranks(3, /*one_store=*/false);
  for (const auto& failure : ranks.configure("twins")) {
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kRendezvous) << failure->describe();
    EXPECT_NE(failure->cause.how.find("are the same process"), std::string::npos)
        << failure->describe();
  }
}

long loops() {
  const auto running = threadSnapshot().running;
  return std::count(running.begin(), running.end(), "ft-loop");
}

TEST(MembersOfAProcess, FormGenerationAfterGeneration) {
  Ranks ranks(3);
  for (const char* prefix : {"first", "second", "third"}) {
    for (const auto& failure : ranks.configure(prefix))
      ASSERT_EQ(failure, nullptr) << failure->describe();
    EXPECT_EQ(loops(), 3);
    for (const auto& failure : ranks.sum()) ASSERT_EQ(failure, nullptr) << failure->describe();
  }
  const auto incarnations = ranks.groups[0]->incarnations();
  EXPECT_EQ(incarnations, ranks.groups[0]->incarnationsBefore());
  EXPECT_TRUE(std::count(incarnations.begin(), incarnations.end(), selfIncarnation()) == 1);
}

TEST(MembersOfAProcess, EndWithTheirLastGroupAndAreReplaced) {
  Ranks ranks(2);
  for (const auto& failure : ranks.configure("pair"))
    ASSERT_EQ(failure, nullptr) << failure->describe();
  for (const auto& group : ranks.groups) EXPECT_TRUE(group->shutdown(Deadline::after(kTestLimit)));
  EXPECT_TRUE(waitFor([] { return loops() == 1; }));
  Ranks others(2);
  for (const auto& failure : others.configure("pair"))
    ASSERT_EQ(failure, nullptr) << failure->describe();
  EXPECT_EQ(loops(), 2);
}

TEST(MembersOfAProcess, TellOfTheirAbortsAndOfTheirEnds) {
  Ranks ranks(3);
  for (const auto& failure : ranks.configure("aborted"))
    ASSERT_EQ(failure, nullptr) << failure->describe();
  ranks.groups[2]->abort("a test");
  for (const auto& failure : ranks.sum()) {
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->cause.rank, 2) << failure->describe();
  }
  for (const auto& failure : ranks.configure("destroyed"))
    ASSERT_EQ(failure, nullptr) << failure->describe();
  ranks.groups.pop_back();
  for (const auto& failure : ranks.sum()) {
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->cause.rank, 2) << failure->describe();
  }
}

}  // namespace
}  // namespace torchft_ext
