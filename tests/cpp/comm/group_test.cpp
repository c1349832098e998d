// Groups through their generations, over the host engine.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "cpp/comm/around_engine.h"
#include "cpp/comm/cluster.h"
#include "cpp/comm/cut_connections.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

void expectSum(Cluster& cluster, const std::vector<int>& which) {
  Cluster::on(which, [&](int i) {
    std::vector<float> values(1000, static_cast<float>(i + 1));
    float expected = 0;
    for (int other : which) expected += static_cast<float>(other + 1);
    FailurePtr failure = finish(cluster.group(i).issue(allreduceOf(values)));
    ASSERT_EQ(failure, nullptr) << failure->describe();
    for (float value : values) ASSERT_EQ(value, expected);
  });
}

TEST(Group, SumsOverWorldsOneToFive) {
  for (int world = 1; world <= 5; ++world) {
    Cluster cluster(world);
    cluster.form(cluster.all(), "sum");
    expectSum(cluster, cluster.all());
  }
}

TEST(Group, ChangesSizeThroughGenerations) {
  Cluster cluster(4);
  cluster.form({0, 1, 2, 3}, "a");
  expectSum(cluster, {0, 1, 2, 3});
  cluster.form({3, 1}, "b");
  expectSum(cluster, {3, 1});
  EXPECT_EQ(cluster.group(3).rank(), 0);
  EXPECT_EQ(cluster.group(1).size(), 2);
  EXPECT_EQ(cluster.group(1).generation(), 2);
  cluster.form({0, 1, 2, 3}, "c");
  expectSum(cluster, {0, 1, 2, 3});
}

TEST(Group, OneHundredGenerationsUnderOnePrefix) {
  Cluster cluster(2);
  for (int i = 0; i < 100; ++i) cluster.form({0, 1}, "same");
  expectSum(cluster, {0, 1});
  EXPECT_EQ(cluster.group(0).stats().generations, 100u);
}

TEST(Group, AbortReleasesEveryRankAndNamesTheOriginator) {
  Cluster cluster(4);
  cluster.form(cluster.all(), "abort");
  std::vector<std::vector<float>> values(4, std::vector<float>(1 << 20, 1.0F));
  std::vector<std::shared_ptr<OpState>> states;
  for (int i = 0; i < 3; ++i)
    states.push_back(cluster.group(i).issue(allreduceOf(values[static_cast<size_t>(i)])));
  cluster.group(3).abort("a test said so");
  for (auto& state : states) {
    FailurePtr failure = finish(state);
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kAborted);
    EXPECT_EQ(failure->cause.rank, 3);
    EXPECT_EQ(failure->op, "allreduce");
    EXPECT_NE(failure->describe().find("a test said so"), std::string::npos) << failure->describe();
  }
  cluster.form(cluster.all(), "again");
  expectSum(cluster, cluster.all());
}

TEST(Group, AbortIsIdempotentAndHarmlessWithoutAGeneration) {
  Cluster cluster(1);
  cluster.group(0).abort("idle");
  EXPECT_EQ(cluster.group(0).errored(), nullptr);
  cluster.form({0}, "a");
  cluster.group(0).abort("first");
  cluster.group(0).abort("second");
  ASSERT_NE(cluster.group(0).errored(), nullptr);
  EXPECT_EQ(cluster.group(0).errored()->cause.how.find("second"), std::string::npos);
}

TEST(Group, BuffersAreUntouchedAfterAbortReturns) {
  Cluster cluster(3);
  for (int round = 0; round < 20; ++round) {
    cluster.form(cluster.all(), "late" + std::to_string(round));
    std::vector<std::vector<float>> values(3, std::vector<float>(1 << 19, 1.0F));
    Cluster::on(cluster.all(), [&](int i) {
      auto& mine = values[static_cast<size_t>(i)];
      auto state = cluster.group(i).issue(allreduceOf(mine));
      if (i == round % 3) {
        state->wait(Deadline::after(std::chrono::microseconds(200 * round)));
        cluster.group(i).abort("round");
      }
      finish(state);
      if (state->failure() == nullptr) return;
      std::fill(mine.begin(), mine.end(), -7.0F);
    });
    // Everyone is out: whatever is still under way in sockets must not land anywhere.
    cluster.form(cluster.all(), "settle" + std::to_string(round));
    for (const auto& mine : values) {
      if (mine[0] != -7.0F) continue;
      for (float value : mine) ASSERT_EQ(value, -7.0F);
    }
  }
}

TEST(Group, IssueAfterFailureFailsAndTouchesNothing) {
  Cluster cluster(2);
  cluster.form({0, 1}, "a");
  cluster.group(0).abort("over");
  std::vector<float> values(10, 3.0F);
  FailurePtr failure = finish(cluster.group(0).issue(allreduceOf(values)));
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kAborted);
  EXPECT_EQ(values, std::vector<float>(10, 3.0F));
}

TEST(Group, AnOperationsTimeoutFailsEveryRankAndNamesTheOriginator) {
  Cluster cluster(3);
  cluster.form(cluster.all(), "timeout");
  std::vector<float> first(10, 1.0F);
  Operation hurried = allreduceOf(first);
  hurried.timeout = std::chrono::milliseconds(100);
  FailurePtr failure = finish(cluster.group(1).issue(hurried));
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kTimeout);
  std::vector<float> second(10, 1.0F);
  FailurePtr told = finish(cluster.group(0).issue(allreduceOf(second)));
  ASSERT_NE(told, nullptr);
  EXPECT_EQ(told->kind, FailureKind::kTimeout);
  EXPECT_EQ(told->cause.rank, 1);
}

TEST(Group, DifferentOperationsAreAMismatchNotAWrongSum) {
  Cluster cluster(2);
  cluster.form({0, 1}, "mismatch");
  std::vector<float> floats(64, 1.0F);
  std::vector<int64_t> integers(64, 1);
  auto a = cluster.group(0).issue(allreduceOf(floats));
  auto b = cluster.group(1).issue(allreduceOf(integers));
  for (const auto& state : {a, b}) {
    FailurePtr failure = finish(state);
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kMismatch) << failure->describe();
  }
}

TEST(Group, AnOutstandingRecvHoldsUpNothing) {
  Cluster cluster(2);
  cluster.form({0, 1}, "p2p");
  std::vector<float> received(300000);
  auto recv = cluster.group(1).issue(recvOf(received, 0, 7));
  expectSum(cluster, {0, 1});
  EXPECT_FALSE(recv->done());
  std::vector<float> sent(300000, 5.0F);
  EXPECT_EQ(finish(cluster.group(0).issue(sendOf(sent, 1, 7))), nullptr);
  EXPECT_EQ(finish(recv), nullptr);
  EXPECT_EQ(received, sent);
}

TEST(Group, AbortInsideALongMessageNamesTheOriginator) {
  Cluster cluster(2);
  for (int round = 0; round < 5; ++round) {
    cluster.form({0, 1}, "long" + std::to_string(round));
    std::vector<float> sent(size_t{16} << 20, 5.0F);
    std::vector<float> received(sent.size());
    auto recv = cluster.group(1).issue(recvOf(received, 0));
    auto send = cluster.group(0).issue(sendOf(sent, 1));
    const Deadline limit = Deadline::after(kTestLimit);
    while (cluster.group(1).stats().bytes_received < 1000 && !limit.expired()) {
    }
    cluster.group(0).abort("inside the message");
    finish(send);
    FailurePtr failure = finish(recv);
    if (!failure) continue;  // it was all through already
    EXPECT_EQ(failure->kind, FailureKind::kAborted) << failure->describe();
    EXPECT_EQ(failure->cause.rank, 0);
  }
}

TEST(Group, GoodbyeFailsOnlyWhoNeedsMore) {
  Cluster cluster(3);
  cluster.form(cluster.all(), "leave");
  expectSum(cluster, cluster.all());
  EXPECT_TRUE(cluster.group(2).shutdown(Deadline::after(kTestLimit)));
  EXPECT_EQ(cluster.group(0).errored(), nullptr);
  std::vector<float> sent(10, 5.0F);
  std::vector<float> received(10);
  auto recv = cluster.group(1).issue(recvOf(received, 0));
  EXPECT_EQ(finish(cluster.group(0).issue(sendOf(sent, 1))), nullptr);
  EXPECT_EQ(finish(recv), nullptr);
  std::vector<float> values(10, 1.0F);
  FailurePtr failure = finish(cluster.group(0).issue(allreduceOf(values)));
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kPeerLeft) << failure->describe();
  EXPECT_EQ(failure->cause.rank, 2);
}

TEST(Group, ALostEngineIsAPeerLostOnEverySurvivor) {
  Cluster cluster(4);
  cluster.form(cluster.all(), "lost");
  std::vector<std::vector<float>> values(4, std::vector<float>(100, 1.0F));
  std::vector<std::shared_ptr<OpState>> states;
  for (int i : {0, 1, 3})
    states.push_back(cluster.group(i).issue(allreduceOf(values[static_cast<size_t>(i)])));
  cluster.members[2].reset();  // its group fails its generation, its engine closes everything
  for (auto& state : states) {
    FailurePtr failure = finish(state);
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->cause.rank, 2) << failure->describe();
  }
  cluster.form({0, 1, 3}, "rest");
  expectSum(cluster, {0, 1, 3});
}

// Both processes live, and say so when they are asked.
TEST(Group, ACutConnectionIsALostConnectionAndItsEndsAreNamed) {
  Cluster cluster(2);
  cluster.form(cluster.all(), "cut");
  std::vector<std::vector<float>> values(2, std::vector<float>(10));
  std::vector<std::shared_ptr<OpState>> states;
  for (int i : {0, 1})
    states.push_back(cluster.group(i).issue(recvOf(values[static_cast<size_t>(i)], 1 - i)));
  const auto self = std::get<MemberRecord>(cluster.members[0]->engine->describeSelf());
  cutConnectionsTo(self.addresses);
  for (auto& state : states) {
    const FailurePtr failure = finish(state);
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kConnectionLost) << failure->describe();
    EXPECT_EQ(failure->cause.rank + failure->cause.other_rank, 1) << failure->describe();
  }
  cluster.form({0, 1}, "again");
  expectSum(cluster, {0, 1});
}

// Nothing reads them for an operation's sake, and the monitor's lines are whole.
TEST(Group, ACutConnectionOfAnIdleGenerationIsALostConnectionToo) {
  Cluster cluster(2);
  cluster.form(cluster.all(), "cut while idle");
  const auto self = std::get<MemberRecord>(cluster.members[0]->engine->describeSelf());
  cutConnectionsTo(self.addresses);
  for (int i : {0, 1}) {
    EXPECT_TRUE(waitFor([&] { return cluster.group(i).errored() != nullptr; }));
    const FailurePtr failure = cluster.group(i).errored();
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kConnectionLost) << failure->describe();
    EXPECT_EQ(failure->cause.rank + failure->cause.other_rank, 1) << failure->describe();
  }
  cluster.form({0, 1}, "again");
  expectSum(cluster, {0, 1});
}

// ---- configure that fails

TEST(Configure, NamesTheMemberThatNeverComesAndTheNextOneWorks) {
  Cluster cluster(3);
  std::string prefix;
  std::string told;
  // A machine that stalls in the last moments costs rank 0 the name: then once more.
  for (int round = 0; round < 10 && told.find("rank 2") == std::string::npos; ++round) {
    prefix = "late" + std::to_string(round);
    Cluster::on({0, 1}, [&](int i) {
      FailurePtr failure =
          cluster.members[static_cast<size_t>(i)]->configure(prefix, i, 3, std::chrono::seconds(1));
      ASSERT_NE(failure, nullptr);
      EXPECT_EQ(failure->kind, FailureKind::kTimeout) << failure->describe();
      EXPECT_EQ(failure->op, "configure");
      if (i == 0) told = failure->describe();
    });
  }
  EXPECT_NE(told.find("rank 2"), std::string::npos) << told;
  cluster.form(cluster.all(), prefix);
  expectSum(cluster, cluster.all());
}

TEST(Configure, AbortFromAnotherThreadReleasesIt) {
  Cluster cluster(2);
  std::atomic<bool> released{false};
  FailurePtr failure;
  std::thread configuring([&] {
    failure = cluster.members[1]->configure("never", 1, 2);
    released = true;
  });
  const Deadline limit = Deadline::after(kTestLimit);
  while (!released && !limit.expired()) {
    cluster.group(1).abort("enough");
    std::this_thread::yield();
  }
  configuring.join();
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kAborted);
  cluster.form({0, 1}, "never");
  expectSum(cluster, {0, 1});
}

TEST(Configure, AMemberThatTriesAgainUnderTheSamePrefixIsAdmitted) {
  Cluster cluster(2);
  FailurePtr first = cluster.members[1]->configure("again", 1, 2, std::chrono::milliseconds(50));
  ASSERT_NE(first, nullptr);
  cluster.form({0, 1}, "again");
  expectSum(cluster, {0, 1});
}

// Waits until so many members of an attempt have come.
void awaitRecords(Cluster& cluster, const std::string& prefix, const std::vector<int>& ranks) {
  const Deadline limit = Deadline::after(kTestLimit);
  for (const int rank : ranks) {
    const std::string key = prefix + "/" + std::to_string(rank);
    while (!decodeRecord(cluster.data->peek(key).value_or("")) && !limit.expired())
      std::this_thread::yield();
  }
  ASSERT_FALSE(limit.expired());
}

TEST(Configure, AMemberThatEndsBeforeItComesIsToldToAllOthers) {
  for (const int victim : {0, 2}) {
    Cluster cluster(3);
    cluster.form(cluster.all(), "first");
    std::vector<int> others{0, 1, 2};
    std::erase(others, victim);
    std::thread killer([&] {
      awaitRecords(cluster, "next", others);
      cluster.members[static_cast<size_t>(victim)].reset();
    });
    Cluster::on(others, [&](int i) {
      FailurePtr failure = cluster.members[static_cast<size_t>(i)]->configure("next", i, 3);
      ASSERT_NE(failure, nullptr);
      EXPECT_EQ(failure->kind, FailureKind::kPeerLost) << failure->describe();
      EXPECT_EQ(failure->cause.rank, victim) << failure->describe();
    });
    killer.join();
    cluster.form(others, "without");
    expectSum(cluster, others);
  }
}

TEST(Configure, AnAbortWhileOthersWaitIsToldToThemAndThePrefixWorksAgain) {
  for (const int aborter : {0, 1, 2}) {
    Cluster cluster(4);
    cluster.form(cluster.all(), "first");
    std::thread abort([&] {
      awaitRecords(cluster, "next", {0, 1, 2});
      cluster.group(aborter).abort("enough");
    });
    Cluster::on({0, 1, 2}, [&](int i) {
      FailurePtr failure = cluster.members[static_cast<size_t>(i)]->configure("next", i, 4);
      ASSERT_NE(failure, nullptr);
      EXPECT_EQ(failure->kind, FailureKind::kAborted) << failure->describe();
      EXPECT_EQ(failure->cause.rank, aborter) << failure->describe();
    });
    abort.join();
    // Who took no part may come before rank 0 does again, and is then told too: once.
    cluster.onAll([&](int i) {
      ClusterMember& member = *cluster.members[static_cast<size_t>(i)];
      FailurePtr failure = member.configure("next", i, 4);
      const bool told = i == 3 && failure && failure->kind == FailureKind::kAborted;
      if (told && failure->cause.rank == aborter) failure = member.configure("next", i, 4);
      ASSERT_EQ(failure, nullptr) << failure->describe();
    });
    expectSum(cluster, cluster.all());
  }
}

TEST(Configure, ShutdownWhileOthersWaitIsToldAsADeparture) {
  Cluster cluster(3);
  cluster.form(cluster.all(), "first");
  std::thread leaver([&] {
    awaitRecords(cluster, "next", {0, 1});
    cluster.group(1).shutdown(Deadline::after(kTestLimit));
  });
  Cluster::on({0, 1}, [&](int i) {
    FailurePtr failure = cluster.members[static_cast<size_t>(i)]->configure("next", i, 3);
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, i == 1 ? FailureKind::kAborted : FailureKind::kPeerLeft);
    EXPECT_EQ(failure->cause.rank, 1) << failure->describe();
  });
  leaver.join();
}

TEST(Configure, TwoProcessesWithOneRankAreToldSo) {
  Cluster cluster(3);
  std::atomic<int> duplicates{0};
  Cluster::on({1, 2}, [&](int i) {
    FailurePtr failure =
        cluster.members[static_cast<size_t>(i)]->configure("twice", 1, 3, std::chrono::seconds(2));
    ASSERT_NE(failure, nullptr);
    if (failure->kind == FailureKind::kRendezvous) ++duplicates;
  });
  EXPECT_GE(duplicates.load(), 1);
}

TEST(Configure, SucceedsOnAllMembersThoughTheFasterOnesBeginTheNextGenerationAtOnce) {
  Cluster cluster(4);
  std::array<FailurePtr, 4> failed;
  cluster.onAll([&](int i) {
    auto& first = failed[static_cast<size_t>(i)];
    for (int generation = 0; generation < 30; ++generation) {
      const FailurePtr failure =
          cluster.members[static_cast<size_t>(i)]->configure(std::to_string(generation), i, 4);
      if (!first) first = failure;
    }
  });
  for (const FailurePtr& failure : failed) EXPECT_EQ(failure, nullptr) << failure->describe();
  cluster.form({3, 1, 0, 2}, "last");
}

bool wasHurried(const FailurePtr& failure) {
  return failure && failure->kind == FailureKind::kAborted &&
         failure->cause.how == "it began another generation";
}

// A sum and the next generation, many times: how often a member was not left the sum. Any other
// failure ends it.
int sumsTakenAway(Cluster& cluster) {
  std::atomic<int> taken{0};
  cluster.onAll([&](int i) {
    FailurePtr failure;
    for (int generation = 0; generation < 60 && !failure; ++generation) {
      std::vector<float> values(50'000, 1.0F);
      failure = finish(cluster.group(i).issue(allreduceOf(values)));
      if (wasHurried(failure)) {
        ++taken;
      } else {
        ASSERT_EQ(failure, nullptr) << failure->describe();
        EXPECT_EQ(values.back(), 4.0F);
      }
      failure =
          cluster.members[static_cast<size_t>(i)]->configure(std::to_string(generation), i, 4);
    }
    EXPECT_EQ(failure, nullptr) << failure->describe();
  });
  return taken;
}

// The slower ones are still at the sum that the faster ones have.
TEST(Configure, LeavesTheLastOperationToTheSlowerMembers) {
  int taken = -1;
  // A machine that stalls leaves them less time than the faster ones allow: then once more.
  for (int round = 0; round < 5 && taken != 0; ++round) {
    Cluster cluster(4);
    cluster.form(cluster.all(), "first");
    taken = sumsTakenAway(cluster);
    if (HasFailure()) break;
  }
  EXPECT_EQ(taken, 0);
}

TEST(Configure, TellsWhoStillNeedsTheGenerationThatThisOneEndsIt) {
  Cluster cluster(2);
  cluster.form(cluster.all(), "first");
  std::vector<float> values(1);
  auto waiting = cluster.group(0).issue(recvOf(values, 1));
  std::thread other([&] { cluster.members[1]->configure("second", 1, 2); });
  const FailurePtr failure = finish(waiting);
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kAborted) << failure->describe();
  EXPECT_EQ(failure->cause.rank, 1);
  EXPECT_EQ(failure->cause.how, "it began another generation");
  EXPECT_EQ(cluster.members[0]->configure("second", 0, 2), nullptr);
  other.join();
}

TEST(Configure, SucceedsOnAllMembersThoughTheFasterOnesShutDownAtOnce) {
  for (int round = 0; round < 10; ++round) {
    Cluster cluster(4);
    std::array<FailurePtr, 4> failed;
    cluster.onAll([&](int i) {
      ClusterMember& member = *cluster.members[static_cast<size_t>(i)];
      failed[static_cast<size_t>(i)] = member.configure("only", i, 4);
      member.group->shutdown(Deadline::after(kTestLimit));
    });
    for (const FailurePtr& failure : failed) EXPECT_EQ(failure, nullptr) << failure->describe();
  }
}

TEST(Configure, LeavesNothingInTheStoreAndNoCallBehind) {
  for (const int size : {1, 2, 5}) {
    Cluster cluster(size);
    std::vector<int> order(static_cast<size_t>(size));
    std::iota(order.begin(), order.end(), 0);
    cluster.form(order, "a");
    // At once, unless the machine is so busy that configure() has not waited for it.
    EXPECT_TRUE(waitFor([&] { return cluster.data->size() == 0; })) << size << " members";
    cluster.data->fail("its server has left with a member's process");
    const int calls = cluster.data->use("").calls();
    for (int i = 0; i < size; ++i) cluster.group(i).shutdown(Deadline::after(kTestLimit));
    EXPECT_EQ(cluster.data->use("").calls(), calls);
  }
}

TEST(Configure, AfterShutdownRaises) {
  Cluster cluster(1);
  cluster.form({0}, "a");
  cluster.group(0).shutdown(Deadline::after(kTestLimit));
  EXPECT_THROW(cluster.members[0]->configure("b", 0, 1), GroupStateError);
}

// Notes that it has heard of its generation's failure.
class NotesFailures : public AroundEngine {
 public:
  NotesFailures(std::shared_ptr<Engine> inner, std::vector<std::string>& told)
      : AroundEngine(std::move(inner)), told_(told) {}

  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override {
    lifecycle->subscribe([this](const FailurePtr&) { told_.emplace_back("engine"); });
    return inner_->form(roster, lifecycle, deadline, superseded);
  }

 private:
  std::vector<std::string>& told_;
};

TEST(Group, WhoSubscribesWhileAGenerationFormsHearsOfItsFailureBeforeTheEngine) {
  std::vector<std::string> told;
  Cluster cluster(1);
  ClusterMember& member = *cluster.members[0];
  member.group = std::make_unique<Group>(
      "test", std::make_shared<NotesFailures>(member.engine, told), std::make_shared<Watchdog>(),
      kTestLimit, nullptr, [&told](const std::shared_ptr<Lifecycle>& lifecycle) {
        lifecycle->subscribe([&told](const FailurePtr&) { told.emplace_back("subscriber"); });
      });
  for (const char* generation : {"first", "second"}) {
    cluster.form({0}, generation);
    cluster.group(0).abort("enough");
    EXPECT_EQ(std::exchange(told, {}), (std::vector<std::string>{"subscriber", "engine"}));
  }
}

}  // namespace
}  // namespace torchft_ext
