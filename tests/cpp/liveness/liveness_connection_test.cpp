// One liveness connection between a loop and the test, which plays the peer.
#include "liveness/liveness_connection.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

std::string beats(size_t count) {
  FrameHeader header;
  header.type = FrameType::kBeat;
  const FrameBytes bytes = encodeHeader(header);
  std::string text;
  for (size_t i = 0; i < count; ++i) text.append(bytes.begin(), bytes.end());
  return text;
}

class ConnectionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::array<int, 2> ends{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()), 0);
    peer_ = UniqueFd(ends[0]);
    own_ = UniqueFd(ends[1]);
  }
  void TearDown() override {
    loop_.runOnLoop([&] { connection_.reset(); }, Deadline::after(std::chrono::seconds(10)));
  }
  void open(const std::function<void(const LivenessConnection::Updates&)>& on_updates) {
    ASSERT_TRUE(loop_.runOnLoop(
        [&, on_updates] {
          connection_ = std::make_unique<LivenessConnection>(loop_, std::move(own_));
          connection_->listen(on_updates);
        },
        Deadline::after(std::chrono::seconds(10))));
  }

  EventLoop loop_{"ft-test-loop"};
  UniqueFd peer_;
  UniqueFd own_;
  std::unique_ptr<LivenessConnection> connection_;
};

TEST_F(ConnectionTest, APeerThatFloodsItLeavesTheLoopTimeForOthers) {
  const std::string flood = beats(LivenessConnection::kMostReadAtOnce / kFrameHeaderBytes * 2);
  ASSERT_EQ(::send(peer_.get(), flood.data(), flood.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(flood.size()));
  std::atomic<int> updates{0};
  std::atomic<bool> ended{false};
  // Among two rounds of news is a task that the first has posted; the last one's may outlive this.
  const auto others = std::make_shared<std::atomic<int>>(0);
  std::atomic<int> others_before_the_end{0};
  open([&, others](const LivenessConnection::Updates& what) {
    ++updates;
    loop_.post([others] { ++*others; });
    if (!what.end) return;
    others_before_the_end = others->load();
    ended = true;
  });
  peer_.reset();
  EXPECT_TRUE(waitFor([&] { return ended.load(); }));
  EXPECT_GE(updates, 2);
  EXPECT_GE(others_before_the_end, 1);
}

TEST_F(ConnectionTest, WhatCameBeforeTheEndIsHeard) {
  std::string words = beats(1);
  FrameHeader header;
  header.type = FrameType::kGoodbye;
  header.aux = 1;
  const FrameBytes goodbye = encodeHeader(header);
  words.append(goodbye.begin(), goodbye.end());
  ASSERT_EQ(::send(peer_.get(), words.data(), words.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(words.size()));
  peer_.reset();
  std::atomic<bool> beat{false};
  std::atomic<int> end{-1};
  open([&](const LivenessConnection::Updates& what) {
    if (what.beat) beat = true;
    if (what.end) end = static_cast<int>(*what.end);
  });
  EXPECT_TRUE(waitFor([&] { return end.load() >= 0; }));
  EXPECT_TRUE(beat);
  EXPECT_EQ(end, static_cast<int>(LivenessEnd::kLeft));
}

}  // namespace
}  // namespace torchft_ext
