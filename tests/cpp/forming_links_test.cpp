// A connection that ends while its epoch forms: has its process, or only the connection?
#include <gtest/gtest.h>

#include <thread>

#include "cluster.h"
#include "net_support.h"

namespace torchft_ext {
namespace {

using namespace net_test;  // NOLINT(google-build-using-namespace)

// Rank 0 is an engine, rank 1 is played by the test.
class FormingLinks : public testing::Test {
 protected:
  FormingLinks() {
    MemberRecord played;
    played.incarnation = Incarnation::random();
    played.host = "elsewhere";
    played.pid = 4711;
    played.addresses = {door_->address()};
    roster_.nonce = Nonce::random();
    roster_.secret = EpochSecret::random();
    roster_.members = {std::get<MemberRecord>(engine_->describeSelf()), played};
  }

  // Both lanes of rank 1, admitted.
  std::vector<RawPeer> connect() {
    std::vector<RawPeer> lanes;
    for (uint8_t lane = 0; lane < 2; ++lane) {
      lanes.emplace_back(roster_.members[0].addresses.front());
      lanes.back().say(
          encodeHello({roster_.nonce, roster_.secret.connector, roster_.members[1].incarnation,
                       roster_.members[0].incarnation, 1, lane}));
      const std::string welcome =
          encodeWelcome({roster_.secret.acceptor, roster_.members[0].incarnation});
      EXPECT_EQ(lanes.back().readBytes(welcome.size()), welcome);
    }
    return lanes;
  }

  // What forming ends with, when rank 1 has done its part.
  Failure failureAfter(const std::function<void()>& part_of_rank_1) {
    const auto lifecycle = std::make_shared<Lifecycle>(EpochIdentity{"test", 1, 0, 2});
    std::thread other(part_of_rank_1);
    auto formed = engine_->form(roster_, lifecycle, testDeadline(), [] { return false; });
    other.join();
    EXPECT_TRUE(std::holds_alternative<Failure>(formed));
    return *lifecycle->failure();
  }

  std::shared_ptr<Engine> engine_ =
      std::get<std::shared_ptr<Engine>>(makeHostEngineForTest(loopbackOptions()));
  std::optional<RawAcceptor> door_{std::in_place};
  Roster roster_;
};

TEST_F(FormingLinks, AConnectionOfALivingProcessIsALostLinkWithTwoEnds) {
  const Failure failure = failureAfter([this] {
    connect().clear();
    RawPeer question = door_->accept();
    question.say(encodeRefusal({RefusalCode::kUnknownEpoch, "it lives"}));
    question.readToEnd();
  });
  EXPECT_EQ(failure.kind, FailureKind::kLinkLost) << failure.describe();
  EXPECT_EQ(failure.cause.rank, 1);
  EXPECT_EQ(failure.cause.other_rank, 0);
  EXPECT_EQ(failure.cause.pid, 4711);
  EXPECT_NE(failure.cause.how.find("while the epoch formed"), std::string::npos);
}

TEST_F(FormingLinks, AConnectionOfADeadProcessIsALostPeer) {
  const Failure failure = failureAfter([this] {
    auto lanes = connect();
    door_.reset();
    lanes.clear();
  });
  EXPECT_EQ(failure.kind, FailureKind::kPeerLost) << failure.describe();
  EXPECT_EQ(failure.cause.rank, 1);
  EXPECT_EQ(failure.cause.host, "elsewhere");
}

// Rank 1 has its links with this rank, and waits for rank 2 as well.
TEST_F(FormingLinks, ATimeoutNamesWhoHasNoLinkRatherThanWhoMissesItToo) {
  roster_.members.push_back(roster_.members[1]);
  roster_.members[2].incarnation = Incarnation::random();
  const auto lifecycle = std::make_shared<Lifecycle>(EpochIdentity{"test", 1, 0, 3});
  std::thread other([this] {
    auto lanes = connect();
    lanes[0].readToEnd();
  });
  auto formed = engine_->form(roster_, lifecycle, Deadline::after(std::chrono::seconds(2)),
                              [] { return false; });
  other.join();
  ASSERT_TRUE(std::holds_alternative<Failure>(formed));
  EXPECT_EQ(lifecycle->failure()->kind, FailureKind::kTimeout) << lifecycle->failure()->describe();
  EXPECT_EQ(lifecycle->failure()->cause.rank, 2) << lifecycle->failure()->describe();
}

// Its barrier came first: the epoch stands, and has failed, and nobody waits.
TEST_F(FormingLinks, AConnectionThatEndsJustBeforeTheEpochStandsIsNotForgotten) {
  const auto lifecycle = std::make_shared<Lifecycle>(EpochIdentity{"test", 1, 0, 2});
  std::thread other([this] {
    auto lanes = connect();
    lanes[0].close();
    RawPeer question = door_->accept();
    question.say(encodeRefusal({RefusalCode::kUnknownEpoch, "it lives"}));
    question.readToEnd();
    FrameHeader barrier;
    barrier.type = FrameType::kBarrier;
    const FrameBytes bytes = encodeHeader(barrier);
    lanes[1].say(std::string(bytes.begin(), bytes.end()));
    lanes[1].readToEnd();
  });
  auto formed = engine_->form(roster_, lifecycle, testDeadline(), [] { return false; });
  EXPECT_TRUE(waitFor([&] { return lifecycle->over(); }));
  lifecycle->fail(Failure{});  // nothing, as a rule: the thread is released in any case
  EXPECT_EQ(lifecycle->failure()->kind, FailureKind::kLinkLost) << lifecycle->failure()->describe();
  other.join();
}

}  // namespace
}  // namespace torchft_ext
