// What a member says on its connections when its generation is over, and when: at once and before
// it wakes its own waiters; but where others know it anyway, some milliseconds after that.
#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "cpp/comm/played_members.h"
#include "net/failure_frame.h"

namespace torchft_ext {
namespace {

constexpr milliseconds kLater{5};               // HostGeneration's
constexpr std::chrono::seconds kLookAtHeld{1};  // HostGeneration's

// One port is too few for a monitor, whose end would take a stopping engine longer than all this.
std::shared_ptr<Engine> engineWithoutMonitor() {
  while (true) {
    HostEngineOptions options = loopbackOptions();
    const uint16_t free_port = net_test::RawAcceptor().address().port();
    options.ports = {free_port, free_port};
    auto engine = makeHostEngineForTest(options);  // a failure: somebody was faster to take it
    if (auto* made = std::get_if<std::shared_ptr<Engine>>(&engine)) return *made;
  }
}

class FinalFrame : public PlayedMembers {
 protected:
  FinalFrame() : PlayedMembers(3, engineWithoutMonitor()) {
    std::thread others([this] {
      for (int rank : {1, 2}) {
        channels_.push_back(connect(rank));
        control(rank).say(frame(FrameType::kBarrier));
      }
      for (int rank : {1, 2}) control(rank).readBytes(kFrameHeaderBytes);  // its barrier
    });
    auto formed = engine_->form(roster_, lifecycle_, testDeadline(), [] { return false; });
    others.join();
    communicator_ = std::get<std::shared_ptr<Communicator>>(formed);
    lifecycle_->activate();
  }

  net_test::RawPeer& control(int rank) { return channels_[static_cast<size_t>(rank - 1)][1]; }

  void tellOfAnAbort(int by) {
    Failure failure;
    failure.kind = FailureKind::kAborted;
    failure.cause = {by, -1, "elsewhere", 4711, "a test said so"};
    control(by).say(frame(FrameType::kFailed, encodeFailure(failure)));
    EXPECT_TRUE(waitFor([&] { return lifecycle_->over(); }));
  }

  // The failure that rank 0 tells that rank; nothing if it says something else, or just closes.
  std::optional<Failure> toldTo(int rank) {
    const std::string all = control(rank).readToEnd();
    if (all.size() < kFrameHeaderBytes) return std::nullopt;
    FrameBytes bytes;
    std::copy_n(all.begin(), kFrameHeaderBytes, bytes.begin());
    const auto header = decodeHeader(bytes, nullptr);
    if (!header || header->type != FrameType::kFailed) return std::nullopt;
    return decodeFailure(all.substr(kFrameHeaderBytes, header->length), 3);
  }

  // An operation under way that only an end of the generation completes. Waits for that, while
  // `ending` brings it about on a thread of its own.
  FailurePtr failureOfAWaiter(const std::function<void()>& ending) {
    const auto state = std::make_shared<OpState>(lifecycle_, OpKind::kRecv, 0, kTestLimit);
    communicator_->issue(state, recvOf(values_, 1));
    ending_ = std::thread(ending);
    const Deadline limit = Deadline::after(kTestLimit);
    while (!state->done() && !limit.expired()) {  // no wake-up: what follows is seen as it is now
    }
    return state->failure();
  }
  void TearDown() override {
    if (ending_.joinable()) ending_.join();
  }
  // Its channels are local sockets: what was written before is there, and what follows is not
  // waited for.
  bool isToldSomething(int rank) {
    pollfd entry{control(rank).fd(), POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  }

  // An operation that tells when a member leaves.
  std::shared_ptr<OpState> watch() {
    const auto state = std::make_shared<OpState>(lifecycle_, OpKind::kRecv, 0, kTestLimit);
    Operation operation;
    operation.kind = OpKind::kRecv;
    operation.watches = true;
    communicator_->issue(state, std::move(operation));
    return state;
  }

  // Rank 1 has failed for want of rank 2, in an exchange that rank 0 has not come to.
  void tellOfALeaverFrom1() {
    Failure failure;
    failure.kind = FailureKind::kPeerLeft;
    failure.cause = {2, -1, "elsewhere", 4711, "it left"};
    FrameHeader header;
    header.type = FrameType::kFailed;
    header.aux = kFinalFrameWasUp | kFinalFrameOfLeaver;
    header.seq = 1;
    const std::string payload = encodeFailure(failure);
    header.length = payload.size();
    const FrameBytes bytes = encodeHeader(header);
    control(1).say(std::string(bytes.begin(), bytes.end()) + payload);
  }

  void stopTheEngine() {
    communicator_.reset();
    engine_.reset();
  }

  const std::shared_ptr<Lifecycle> lifecycle_ =
      std::make_shared<Lifecycle>(GenerationIdentity{"test", 1, 0, 3});
  std::shared_ptr<Communicator> communicator_;
  std::vector<float> values_ = std::vector<float>(1);
  std::thread ending_;
  std::vector<std::vector<net_test::RawPeer>> channels_;
};

TEST_F(FinalFrame, OfWhoWasToldByOneMemberReachTheOthers) {
  tellOfAnAbort(1);
  const auto told = toldTo(2);
  ASSERT_TRUE(told.has_value());
  EXPECT_EQ(told->kind, FailureKind::kAborted);
  EXPECT_EQ(told->cause.rank, 1);
  EXPECT_EQ(told->cause.how, "a test said so");
}

TEST_F(FinalFrame, AreSaidThoughTheEngineStopsAtOnce) {
  tellOfAnAbort(1);
  stopTheEngine();
  const auto told = toldTo(2);
  ASSERT_TRUE(told.has_value());
  EXPECT_EQ(told->cause.rank, 1);
}

TEST_F(FinalFrame, OfWhoEndsTheGenerationItselfComeBeforeItsOwnWaiters) {
  const FailurePtr failure = failureOfAWaiter([this] {
    lifecycle_->fail(lifecycle_->ownFailure(FailureKind::kAborted, "a test said so"));
  });
  EXPECT_TRUE(isToldSomething(1));
  EXPECT_TRUE(isToldSomething(2));
  EXPECT_NE(failure, nullptr);
  for (int rank : {1, 2}) {
    const auto told = toldTo(rank);
    ASSERT_TRUE(told.has_value());
    EXPECT_EQ(told->cause.rank, 0);
  }
}

TEST_F(FinalFrame, OfWhoWasToldComeAfterItsOwnWaiters) {
  const auto began = Clock::now();
  const FailurePtr failure = failureOfAWaiter([this] { tellOfAnAbort(1); });
  const bool already = isToldSomething(2);
  const bool in_time = Clock::now() < began + kLater;  // else this test tells nothing
  EXPECT_FALSE(already && in_time);
  EXPECT_NE(failure, nullptr);
  EXPECT_TRUE(toldTo(2).has_value());
}

TEST_F(FinalFrame, OfWhoGoesOnAreAGoodbyeThoughTheEngineStopsAtOnce) {
  ASSERT_TRUE(communicator_->leaveForAnother(testDeadline()));
  stopTheEngine();
  for (int rank : {1, 2}) {
    const std::string all = control(rank).readToEnd();
    ASSERT_EQ(all.size(), kFrameHeaderBytes);
    FrameBytes bytes;
    std::copy_n(all.begin(), kFrameHeaderBytes, bytes.begin());
    const auto header = decodeHeader(bytes, nullptr);
    ASSERT_TRUE(header.has_value());
    EXPECT_EQ(header->type, FrameType::kGoodbye);
    EXPECT_EQ(header->aux, kFinalFrameWasUp | kFinalFrameBeginsAnother);
  }
}

TEST_F(FinalFrame, OfOneOfSeveralMembersThatLeavesEndsAWatch) {
  const auto state = watch();
  FrameHeader goodbye;
  goodbye.type = FrameType::kGoodbye;
  goodbye.aux = kFinalFrameWasUp;
  const FrameBytes bytes = encodeHeader(goodbye);
  control(2).say({bytes.begin(), bytes.end()});
  ASSERT_TRUE(state->wait(testDeadline()));
  ASSERT_NE(state->failure(), nullptr);
  EXPECT_EQ(state->failure()->kind, FailureKind::kPeerLeft);
  EXPECT_EQ(state->failure()->cause.rank, 2);
}

// Its connections neither end nor bring what it had sent.
TEST_F(FinalFrame, ThatIsHeldBackEndsTheGenerationThoughTheTellersHostIsGone) {
  Operation broadcast;
  broadcast.kind = OpKind::kBroadcast;
  broadcast.dtype = DType::kFloat;
  broadcast.root = 1;
  broadcast.outputs = {bufferOf(values_)};
  const auto state = std::make_shared<OpState>(lifecycle_, OpKind::kBroadcast, 0, kTestLimit);
  communicator_->issue(state, std::move(broadcast));
  const auto told = Clock::now();
  tellOfALeaverFrom1();
  ASSERT_TRUE(state->wait(testDeadline()));
  EXPECT_GE(Clock::now() - told, 2 * kLookAtHeld);
  ASSERT_NE(state->failure(), nullptr);
  EXPECT_EQ(state->failure()->kind, FailureKind::kPeerLeft);
  EXPECT_EQ(state->failure()->cause.rank, 2);
}

TEST_F(FinalFrame, IsAGoodbyeThoughAWatchIsPending) {
  const auto state = watch();
  ASSERT_TRUE(communicator_->leave(testDeadline()));
  EXPECT_TRUE(state->done());
  ASSERT_NE(state->failure(), nullptr);
  EXPECT_EQ(state->failure()->kind, FailureKind::kAborted);
  EXPECT_FALSE(toldTo(1).has_value());
}

}  // namespace
}  // namespace torchft_ext
