// A connection that ends while its generation forms: has its process, or only the connection?
#include <gtest/gtest.h>

#include <thread>

#include "cpp/comm/played_members.h"

namespace torchft_ext {
namespace {

using namespace net_test;  // NOLINT(google-build-using-namespace)

class FormingConnections : public PlayedMembers {
 protected:
  // What forming ends with, when rank 1 has done its part.
  Failure failureAfter(const std::function<void()>& part_of_rank_1) {
    const auto lifecycle = std::make_shared<Lifecycle>(GenerationIdentity{"test", 1, 0, 2});
    std::thread other(part_of_rank_1);
    auto formed = engine_->form(roster_, lifecycle, testDeadline(), [] { return false; });
    other.join();
    EXPECT_TRUE(std::holds_alternative<Failure>(formed));
    return *lifecycle->failure();
  }
  // What forming ends with, for want of rank 2. Rank 1 has its connections with this rank, and
  // waits for rank 2 as well.
  Failure failureWithoutRank2() {
    roster_.nonce = Nonce::random();
    const auto lifecycle = std::make_shared<Lifecycle>(GenerationIdentity{"test", 1, 0, 3});
    std::thread other([this] {
      auto channels = connect();
      channels[0].readToEnd();
    });
    auto formed = engine_->form(roster_, lifecycle, Deadline::after(std::chrono::seconds(2)),
                                [] { return false; });
    other.join();
    EXPECT_TRUE(std::holds_alternative<Failure>(formed));
    return *lifecycle->failure();
  }
};

TEST_F(FormingConnections, AConnectionOfALivingProcessIsALostConnectionWithTwoEnds) {
  const Failure failure = failureAfter([this] {
    connect().clear();
    RawPeer question = acceptor_->accept();
    question.say(encodeRefusal({RefusalCode::kUnknownGeneration, "it lives"}));
    question.readToEnd();
  });
  EXPECT_EQ(failure.kind, FailureKind::kConnectionLost) << failure.describe();
  EXPECT_EQ(failure.cause.rank, 1);
  EXPECT_EQ(failure.cause.other_rank, 0);
  EXPECT_EQ(failure.cause.pid, 4711);
  EXPECT_NE(failure.cause.how.find("while the generation formed"), std::string::npos);
}

TEST_F(FormingConnections, AConnectionOfADeadProcessIsALostPeer) {
  const Failure failure = failureAfter([this] {
    auto channels = connect();
    acceptor_.reset();
    channels.clear();
  });
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost) << failure.describe();
  EXPECT_EQ(failure.cause.rank, 1);
  EXPECT_EQ(failure.cause.host, "elsewhere");
}

// All have come by then, so it is no latecomer; this process connects, and nobody lets it in.
TEST_F(FormingConnections, AConnectionThatCannotBeMadeIsALostConnectionWithTwoEnds) {
  HostEngineOptions options = loopbackOptions();
  options.heartbeat_limit = std::chrono::seconds(1);
  const auto engine = std::get<std::shared_ptr<Engine>>(makeHostEngineForTest(options));
  roster_.members = {roster_.members[1], std::get<MemberRecord>(engine->describeSelf())};
  const auto lifecycle = std::make_shared<Lifecycle>(GenerationIdentity{"test", 1, 1, 2});
  engine->form(roster_, lifecycle, testDeadline(), [] { return false; });
  const FailurePtr failure = lifecycle->failure();
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, FailureKind::kConnectionLost) << failure->describe();
  EXPECT_EQ(failure->cause.rank, 0);
  EXPECT_EQ(failure->cause.other_rank, 1);
}

TEST_F(FormingConnections, ATimeoutNamesWhoHasNoConnectionRatherThanWhoMissesItToo) {
  roster_.members.push_back(roster_.members[1]);
  roster_.members[2].incarnation = Incarnation::random();
  Failure failure;
  // A machine that stalls when the time is up costs it the name: then once more.
  for (int round = 0; round < 5 && failure.cause.rank < 0; ++round) {
    failure = failureWithoutRank2();
    EXPECT_EQ(failure.kind, FailureKind::kTimeout) << failure.describe();
  }
  EXPECT_EQ(failure.cause.rank, 2) << failure.describe();
}

// Its barrier came first: the generation stands, and has failed, and nobody waits.
TEST_F(FormingConnections, AConnectionThatEndsJustBeforeTheGenerationStandsIsNotForgotten) {
  const auto lifecycle = std::make_shared<Lifecycle>(GenerationIdentity{"test", 1, 0, 2});
  std::thread other([this] {
    auto channels = connect();
    channels[0].close();
    RawPeer question = acceptor_->accept();
    question.say(encodeRefusal({RefusalCode::kUnknownGeneration, "it lives"}));
    question.readToEnd();
    channels[1].say(frame(FrameType::kBarrier));
    channels[1].readToEnd();
  });
  auto formed = engine_->form(roster_, lifecycle, testDeadline(), [] { return false; });
  EXPECT_TRUE(waitFor([&] { return lifecycle->over(); }));
  lifecycle->fail(Failure{});  // nothing, as a rule: the thread is released in any case
  EXPECT_EQ(lifecycle->failure()->kind, FailureKind::kConnectionLost)
      << lifecycle->failure()->describe();
  other.join();
}

}  // namespace
}  // namespace torchft_ext
