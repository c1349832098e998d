// A store that ends in the middle of a configure(): everyone ends, says why, and goes on elsewhere.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>

#include "cpp/comm/around_engine.h"
#include "cpp/comm/cluster.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

// Of a configure() whose store freezes, and of one whose store dies: that ends before.
constexpr milliseconds kFrozenLimit{400};
constexpr std::chrono::seconds kDeadLimit{30};
constexpr milliseconds kApart{60};  // the limits of members whose time is not up together
constexpr std::chrono::seconds kConnectionsLimit{2};  // of members that wait for connections
constexpr int kMostCalls = 1000;                      // nobody needs so many
// A machine that stalls leaves a member no time to find out why it ends: then once more, so often.
constexpr int kMostRounds = 4;
// A store that has been silent for less than 100 ms, while connections are made, may only be slow,
// and goes unnamed; members that wait for a core ask it later.
constexpr milliseconds kNamedAfter{300};

// A store server of its own and a client's thread for each member.
struct Server {
  Server(int size, const std::string& name) {
    for (int rank = 0; rank < size; ++rank) {
      threads.push_back(std::make_shared<StoreThread>(name, data->factory(std::to_string(rank))));
    }
  }
  ~Server() { data->release(); }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  std::shared_ptr<MemoryStore> data = std::make_shared<MemoryStore>();
  std::vector<std::shared_ptr<StoreThread>> threads;
};

// Whose deadline passes first while others wait on: of all at once, rank 0's, or the last rank's.
enum class First { kTogether, kLeader, kLast };

class StoreEnds : public testing::TestWithParam<std::tuple<int, MemoryStore::End, First>> {
 protected:
  Duration laterBy(int rank) const {
    if (first_ == First::kTogether) return Duration::zero();
    return (first_ == First::kLeader ? rank : size_ - 1 - rank) * kApart;
  }
  // What each member's configure() ends with; none outlasts its limit.
  std::vector<FailurePtr> configureAll(Server& server, Duration limit) {
    std::vector<FailurePtr> failures(static_cast<size_t>(size_));
    const Deadline late = Deadline::after(limit + kTestPatience / 2);
    cluster_.onAll([&](int i) {
      const auto rank = static_cast<size_t>(i);
      failures[rank] =
          cluster_.group(i).configure(server.threads[rank], "run", i, size_, limit + laterBy(i));
    });
    EXPECT_FALSE(late.expired()) << "a member outlasted its limit";
    return failures;
  }
  struct Round {
    bool ended = true;        // the store: it came to that call
    std::string unexplained;  // what a member says that could have named it, and does not
  };
  // Each member succeeds, or fails because of the store, which ends at that call.
  Round endStoreAt(int call) {
    const std::string name = "server" + std::to_string(++servers_);
    Server server(size_, name);
    server.data->endAt(call, end_);
    const Duration limit = dies_ ? Duration(kDeadLimit) : Duration(kFrozenLimit);
    const auto noticed_until = Clock::now() + limit - kNamedAfter;
    const auto failures = configureAll(server, limit);
    const bool in_time = server.data->endedAt().value_or(noticed_until) < noticed_until;
    Round round;
    round.ended = server.data->ended();
    for (const FailurePtr& failure : failures) {
      if (!failure) continue;
      const std::string text = failure->describe();
      EXPECT_EQ(failure->kind, dies_ ? FailureKind::kStoreLost : FailureKind::kTimeout) << text;
      const bool named = text.find("the store at " + name) != std::string::npos;
      if (in_time && !named) round.unexplained = text;
    }
    goOnElsewhere();
    return round;
  }
  void goOnElsewhere() {
    Server another(size_, "another");
    for (const FailurePtr& failure : configureAll(another, kTestLimit))
      EXPECT_EQ(failure, nullptr) << failure->describe();
    cluster_.onAll([this](int i) {
      std::vector<float> values(10, 1.0F);
      EXPECT_EQ(finish(cluster_.group(i).issue(allreduceOf(values))), nullptr);
      EXPECT_EQ(values[0], static_cast<float>(size_));
    });
  }

  const int size_ = std::get<0>(GetParam());
  const MemoryStore::End end_ = std::get<1>(GetParam());
  const bool dies_ = end_ == MemoryStore::End::kDies;
  const First first_ = std::get<2>(GetParam());
  Cluster cluster_{size_};
  int servers_ = 0;
};

TEST_P(StoreEnds, AtWhicheverCallEveryMemberEndsSaysWhyAndGoesOnElsewhere) {
  const int rounds = dies_ ? 1 : kMostRounds;
  Round last;
  for (int call = 1; last.ended; ++call) {
    ASSERT_LT(call, kMostCalls);
    last = endStoreAt(call);
    for (int more = rounds - 1; more > 0 && !last.unexplained.empty(); --more)
      last = endStoreAt(call);
    EXPECT_EQ(last.unexplained, "") << "call " << call;
    if (HasFatalFailure()) FAIL() << "call " << call;
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, StoreEnds,
                         testing::Combine(testing::Values(1, 2, 3),
                                          testing::Values(MemoryStore::End::kDies,
                                                          MemoryStore::End::kFreezes),
                                          testing::Values(First::kTogether)));
// Only who has connections can be told by another whose time was up before.
INSTANTIATE_TEST_SUITE_P(OneAfterTheOther, StoreEnds,
                         testing::Combine(testing::Values(3),
                                          testing::Values(MemoryStore::End::kFreezes),
                                          testing::Values(First::kLeader, First::kLast)));

// Its store ends when all members have the roster and before any has a connection. The one of rank
// 1 waits until rank 0 has asked the store again.
class EndsTheStore : public AroundEngine {
 public:
  struct Moment {
    std::shared_ptr<MemoryStore> store;
    std::atomic<int> have_rosters{0};
    std::atomic<bool> ended{false};
  };

  EndsTheStore(std::shared_ptr<Engine> inner, std::shared_ptr<Moment> moment)
      : AroundEngine(std::move(inner)), moment_(std::move(moment)) {}

  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override {
    const auto size = static_cast<int>(roster.members.size());
    const bool last = ++moment_->have_rosters == size;
    if (last) {
      moment_->store->block();
      moment_->ended = true;
    }
    EXPECT_TRUE(waitFor([this] { return moment_->ended.load(); }));
    const MemberRecord self = std::get<MemberRecord>(describeSelf());
    if (roster.members[1].incarnation == self.incarnation) {
      EXPECT_TRUE(waitFor([this] { return moment_->store->held() > 0; }));
    }
    return inner_->form(roster, lifecycle, deadline, superseded);
  }

 private:
  const std::shared_ptr<Moment> moment_;
};

TEST(StoreFreezesWhileConnectionsForm, TheGenerationBeginsLongBeforeTheDeadline) {
  const auto moment = std::make_shared<EndsTheStore::Moment>();
  Cluster cluster(3, loopbackOptions(), [&moment](std::shared_ptr<Engine> engine) {
    return std::make_shared<EndsTheStore>(std::move(engine), moment);
  });
  moment->store = cluster.data;
  const Deadline late = Deadline::after(kTestLimit / 2);
  cluster.form(cluster.all(), "run");
  EXPECT_FALSE(late.expired());
  cluster.data->release();
}

// Has the roster, and, if it is the late one, makes no connection before it is told to.
class ConnectionsLate : public AroundEngine {
 public:
  struct Moment {
    std::atomic<int> have_rosters{0};
    std::atomic<bool> may_connect{false};
  };

  ConnectionsLate(std::shared_ptr<Engine> inner, std::shared_ptr<Moment> moment, bool late)
      : AroundEngine(std::move(inner)), moment_(std::move(moment)), late_(late) {}

  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override {
    ++moment_->have_rosters;
    if (late_) {
      EXPECT_TRUE(waitFor([this] { return moment_->may_connect.load(); }));
    }
    return inner_->form(roster, lifecycle, deadline, superseded);
  }

 private:
  const std::shared_ptr<Moment> moment_;
  const bool late_;
};

// Three members of which rank 1 makes no connection before it may.
class MemberThatMakesNoConnection : public testing::Test {
 protected:
  static constexpr int kLate = 1;

  // The late one may make its connections when the time of both others is up.
  void configureAll(const std::string& prefix) {
    std::atomic<int> over{0};
    moment_->may_connect = false;
    cluster_.onAll([&](int i) {
      const auto rank = static_cast<size_t>(i);
      failures_[rank] = cluster_.group(i).configure(server_.threads[rank], prefix, i, 3,
                                                    i == kLate ? kTestLimit : kConnectionsLimit);
      if (i != kLate && ++over == 2) moment_->may_connect = true;
    });
  }
  // It, and it alone, is to be the cause of all ends. Empty: it is.
  std::string otherCause() const {
    for (const int i : {0, 2}) {
      const std::string text = failures_[static_cast<size_t>(i)]->describe();
      if (text.find("rank 1") == std::string::npos || text.find("the store") != std::string::npos)
        return text;
    }
    const FailurePtr& told = failures_[kLate];
    return told->cause.rank == kLate ? "" : told->describe();
  }

  const std::shared_ptr<ConnectionsLate::Moment> moment_ =
      std::make_shared<ConnectionsLate::Moment>();
  int made_ = 0;
  Cluster cluster_{3, loopbackOptions(), [this](std::shared_ptr<Engine> engine) {
                     return std::make_shared<ConnectionsLate>(std::move(engine), moment_,
                                                              made_++ == kLate);
                   }};
  Server server_{3, "server"};
  std::vector<FailurePtr> failures_{3};
};

TEST_F(MemberThatMakesNoConnection, IsWhatTheTimeoutNamesAndNotTheStore) {
  std::string other = "no round yet";
  for (int round = 0; round < kMostRounds && !other.empty(); ++round) {
    const Deadline late = Deadline::after(kTestLimit / 2);
    configureAll("run" + std::to_string(round));
    EXPECT_FALSE(late.expired()) << "the late one is told so, whatever its own limit";
    for (const FailurePtr& failure : failures_) ASSERT_NE(failure, nullptr);
    for (const int i : {0, 2}) {
      const FailurePtr& failure = failures_[static_cast<size_t>(i)];
      EXPECT_EQ(failure->kind, FailureKind::kTimeout) << failure->describe();
    }
    other = otherCause();
  }
  EXPECT_EQ(other, "");
}

// The late one is let go only when both others have been released.
TEST_F(MemberThatMakesNoConnection, AnAbortWhileConnectionsFormReleasesAllAtOnce) {
  std::atomic<int> released{0};
  const Deadline late = Deadline::after(kTestLimit / 2);
  std::thread aborter([this] {
    EXPECT_TRUE(waitFor([this] { return moment_->have_rosters == 3; }));
    cluster_.group(0).abort("the test says so");
  });
  cluster_.onAll([&](int i) {
    const auto rank = static_cast<size_t>(i);
    failures_[rank] =
        cluster_.group(i).configure(server_.threads[rank], "run", i, 3, Duration(kTestLimit));
    if (i != kLate && ++released == 2) moment_->may_connect = true;
  });
  aborter.join();
  EXPECT_FALSE(late.expired());
  for (const FailurePtr& failure : failures_) {
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->kind, FailureKind::kAborted) << failure->describe();
    EXPECT_EQ(failure->cause.rank, 0) << failure->describe();
  }
}

}  // namespace
}  // namespace torchft_ext
