// What tests of connections and of what runs over them share: a loop, connected sockets, a receiver
// that records.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpp/support/wait_for.h"
#include "host/connection.h"

namespace torchft_ext {

struct SocketPair {
  UniqueFd first;
  UniqueFd second;
};

// How processes of one host, or of two, are connected.
enum class Transport { kTcp, kLocal };

// Two ends of a TCP connection over loopback, non-blocking. buffer_bytes > 0: small kernel buffers.
inline SocketPair tcpPair(int buffer_bytes = 0) {
  const auto limit = [buffer_bytes](int fd) {
    if (buffer_bytes == 0) return;
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof(buffer_bytes));
    ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof(buffer_bytes));
  };
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  limit(listener.get());
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(listener.get(), raw, sizeof(address)), 0);
  EXPECT_EQ(::listen(listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(listener.get(), raw, &length), 0);
  SocketPair pair;
  pair.first = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  limit(pair.first.get());
  EXPECT_EQ(::connect(pair.first.get(), raw, sizeof(address)), 0);
  pair.second = UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  for (const int fd : {pair.first.get(), pair.second.get()}) {
    const int yes = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    EXPECT_EQ(::fcntl(fd, F_SETFL, O_NONBLOCK), 0);
  }
  return pair;
}

// The same, of a Unix socket.
inline SocketPair localPair(int buffer_bytes = 0) {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  if (buffer_bytes > 0) {
    for (const int fd : ends)
      ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof(buffer_bytes));
  }
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

inline SocketPair connectedPair(Transport transport, int buffer_bytes = 0) {
  return transport == Transport::kTcp ? tcpPair(buffer_bytes) : localPair(buffer_bytes);
}

// A loop and calls onto it. What tests share with the loop's thread is touched on the loop only.
class TestLoop {
 public:
  EventLoop& loop() { return loop_; }
  void on(const std::function<void()>& body) { ASSERT_TRUE(loop_.runOnLoop(body, testDeadline())); }
  // The condition is evaluated on the loop.
  bool eventually(const std::function<bool()>& condition) {
    return waitFor([&] {
      auto holds = std::make_shared<bool>(false);
      return loop_.runOnLoop([holds, &condition] { *holds = condition(); }, testDeadline()) &&
             *holds;
    });
  }
  // Everything posted so far, and what that posted, has run.
  void settle() {
    for (int i = 0; i < 4; ++i) on([] {});
  }

 private:
  EventLoop loop_{"test-loop"};
};

inline FrameHeader frameOf(FrameType type, uint64_t length, uint64_t seq = 0) {
  FrameHeader header;
  header.type = type;
  header.length = length;
  header.seq = seq;
  return header;
}

// Answers each header by `answer`, and keeps what it was told.
class RecordingReceiver : public ConnectionReceiver {
 public:
  std::function<Receipt(const FrameHeader&)> answer;
  std::function<void(const FrameHeader&)> on_frame;
  std::vector<uint64_t> offered;                        // seq of every offered header
  std::vector<uint64_t> frames;                         // seq of every delivered frame
  std::vector<std::pair<uint64_t, std::string>> texts;  // seq and payload
  int broken = 0;
  bool clean = false;
  std::string why;

  Receipt onHeader(const FrameHeader& header) override {
    offered.push_back(header.seq);
    return answer(header);
  }
  void onFrame(const FrameHeader& header) override {
    frames.push_back(header.seq);
    if (on_frame) on_frame(header);
  }
  void onText(const FrameHeader& header, std::string payload) override {
    texts.emplace_back(header.seq, std::move(payload));
  }
  void onBroken(const std::string& reason, bool between_frames) override {
    ++broken;
    why = reason;
    clean = between_frames;
  }

  // Every payload goes to its own buffer, in order.
  void takeEverything() {
    answer = [this](const FrameHeader& header) {
      Receipt receipt;
      if (header.type == FrameType::kData) {
        receipt.kind = Receipt::Kind::kInto;
        buffers.emplace_back(header.length);
        receipt.into = buffers.back().data();
      } else {
        receipt.kind = Receipt::Kind::kText;
      }
      return receipt;
    };
  }
  std::vector<std::vector<uint8_t>> buffers;
};

inline std::vector<uint8_t> patternOf(size_t bytes, uint8_t first = 1) {
  std::vector<uint8_t> pattern(bytes);
  for (size_t i = 0; i < bytes; ++i) pattern[i] = static_cast<uint8_t>(first + i * 7 + i / 251);
  return pattern;
}

}  // namespace torchft_ext
