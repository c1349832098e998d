// net/framed_socket.h: frames over a socket pair, whose other end the test plays.
#include "net/framed_socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <atomic>

#include "cpp/support/net_support.h"

namespace torchft_ext {
namespace {

using net_test::onLoop;

class FramedSocketTest : public ::testing::Test {
 protected:
  FramedSocketTest() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()), 0);
    peer_ = net_test::RawPeer(UniqueFd(ends[0]));
    FramedSocket::Handlers handlers;
    handlers.on_frame = [this](const FrameHeader& header, const std::string&) {
      last_ = header.seq;
      ++frames_;
    };
    handlers.on_end = [this](const std::string&) { frames_at_end_ = frames_.load(); };
    onLoop(loop_, [&] {
      socket_ =
          std::make_unique<FramedSocket>(loop_, UniqueFd(ends[1]), std::vector{FrameType::kElastic},
                                         std::move(handlers), size_t{64} << 20U);
    });
  }
  ~FramedSocketTest() override {
    onLoop(loop_, [this] { socket_.reset(); });
  }

  static FrameHeader header(uint64_t seq, uint64_t length) {
    FrameHeader header;
    header.type = FrameType::kElastic;
    header.seq = seq;
    header.length = length;
    return header;
  }
  static std::string frame(uint64_t seq, const std::string& payload) {
    const FrameBytes bytes = encodeHeader(header(seq, payload.size()));
    return std::string(bytes.begin(), bytes.end()) + payload;
  }
  bool somethingCame() const {
    char byte = 0;
    return ::recv(peer_.fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
  }

  EventLoop loop_{"test"};
  net_test::RawPeer peer_;
  std::unique_ptr<FramedSocket> socket_;
  std::atomic<int> frames_{0};
  std::atomic<uint64_t> last_{0};
  std::atomic<int> frames_at_end_{-1};
};

TEST_F(FramedSocketTest, WhatIsAddedGoesOutWithTheFlush) {
  onLoop(loop_, [this] {
    socket_->add(header(1, 0), "one");
    socket_->add(header(2, 0), "two");
  });
  EXPECT_FALSE(somethingCame());
  onLoop(loop_, [this] { socket_->flush(); });
  const std::string expected = frame(1, "one") + frame(2, "two");
  EXPECT_EQ(peer_.readBytes(expected.size()), expected);
}

TEST_F(FramedSocketTest, FramesBeforeTheEndAreTakenBeforeIt) {
  std::string all;
  for (uint64_t i = 1; i <= 3; ++i) all += frame(i, std::string(16384, 'x'));
  peer_.say(all);
  peer_.close();
  EXPECT_TRUE(waitFor([this] { return frames_at_end_ >= 0; }));
  EXPECT_EQ(frames_at_end_, 3);
  EXPECT_EQ(last_, 3U);
}

TEST_F(FramedSocketTest, WhatTheKernelDoesNotTakeFollowsWhenThereIsRoom) {
  const std::string large(size_t{4} << 20U, 'y');
  for (uint64_t i = 1; i <= 2; ++i) {
    bool waits = false;
    onLoop(loop_, [&] {
      socket_->send(header(i, 0), large);
      waits = socket_->hasUnsent();
    });
    EXPECT_TRUE(waits);
    const std::string expected = frame(i, large);
    EXPECT_TRUE(peer_.readBytes(expected.size()) == expected);
  }
  peer_.say(frame(7, "answer"));
  EXPECT_TRUE(waitFor([this] { return last_ == 7; }));
}

}  // namespace
}  // namespace torchft_ext
