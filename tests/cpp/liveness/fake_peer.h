// A peer's monitor played by a test, byte by byte: one main connection, on the test's own thread,
// with blocking sockets.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <string>

#include "cpp/support/wait_for.h"
#include "liveness/notice.h"
#include "liveness/peer_monitor.h"
#include "net/frame.h"
#include "net/handshake.h"
#include "net/socket_address.h"

namespace torchft_ext {

// One end of a connection. Reads wait for the test's patience and then give kHello, which no test
// expects.
class RawConnection {
 public:
  struct Frame {
    FrameHeader header;
    std::string payload;
  };

  RawConnection() = default;
  explicit RawConnection(UniqueFd fd) : fd_(std::move(fd)) {}

  void write(const std::string& bytes) {
    ASSERT_TRUE(ready(POLLOUT));
    ASSERT_EQ(::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void write(FrameType type, uint64_t tag, uint64_t aux, const std::string& payload = "") {
    FrameHeader header;
    header.type = type;
    header.tag = tag;
    header.aux = aux;
    header.length = payload.size();
    const FrameBytes bytes = encodeHeader(header);
    write(std::string(bytes.begin(), bytes.end()) + payload);
  }
  void beat(Duration limit = Duration::zero()) {
    write(
        FrameType::kBeat,
        static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(limit).count()),
        0);
  }

  void write(const Notice& notice) { write(FrameType::kNotice, 0, 0, encodeNotice(notice)); }

  // The next frame, but for questions about a generation.
  Frame read() {
    Frame frame = readFrame();
    while (isQuestion(frame)) frame = readFrame();
    return frame;
  }
  // The next frame that is no beat.
  Frame readUpdates() {
    Frame frame = read();
    while (frame.header.type == FrameType::kBeat) frame = read();
    return frame;
  }
  // The next notice; one without a generation if something else comes.
  Notice readNotice() {
    const Frame frame = readUpdates();
    const bool notice = frame.header.type == FrameType::kNotice;
    return notice ? decodeNotice(frame.payload).value_or(Notice{}) : Notice{};
  }
  bool isEnded() { return readUpdates().header.type == FrameType::kHello && ended_; }
  void close() { fd_.reset(); }

 private:
  bool ready(short events) const {
    pollfd entry{fd_.get(), events, 0};
    return ::poll(&entry, 1, static_cast<int>(milliseconds(kTestPatience).count())) == 1;
  }
  Frame readFrame() {
    Frame frame;
    const std::string header = readBytes(kFrameHeaderBytes);
    if (header.size() < kFrameHeaderBytes) return frame;
    FrameBytes bytes;
    std::copy_n(header.begin(), bytes.size(), bytes.begin());
    frame.header = decodeHeader(bytes, nullptr).value_or(FrameHeader{});
    frame.payload = readBytes(frame.header.length);
    return frame;
  }
  static bool isQuestion(const Frame& frame) {
    if (frame.header.type != FrameType::kNotice) return false;
    const std::optional<Notice> notice = decodeNotice(frame.payload);
    return notice && notice->type == Notice::Type::kAsk;
  }
  std::string readBytes(size_t size) {
    std::string bytes(size, '\0');
    size_t have = 0;
    while (have < size && ready(POLLIN)) {
      const ssize_t got = ::recv(fd_.get(), bytes.data() + have, size - have, 0);
      if (got <= 0) {
        ended_ = true;
        break;
      }
      have += static_cast<size_t>(got);
    }
    bytes.resize(have);
    return bytes;
  }

  UniqueFd fd_;
  bool ended_ = false;
};

class FakePeer {
 public:
  // The greater incarnation connects.
  enum class Role { kConnects, kAccepts };
  static constexpr int kRank = 5;

  // number: tells several of them apart; their ranks follow each other.
  explicit FakePeer(Role role, int number = 0) : rank_(kRank + number) {
    incarnation_.bytes.fill(role == Role::kConnects ? 0xff : 0x00);
    incarnation_.bytes[15] = static_cast<uint8_t>(1 + number);
    std::string error;
    acceptor_ = listenOn(*SocketAddress::fromNumeric("127.0.0.1", 0), {}, &error);
  }

  MonitoredPeer record() const { return {rank_, incarnation_, "fake", 4711, {acceptor_->address}}; }
  void closePort() { acceptor_->fd.reset(); }

  RawConnection connect(const SocketAddress& to, const Nonce& nonce,
                        const GenerationSecret& secret) const {
    std::string error;
    RawConnection line(startConnect(to, &error));
    Hello hello;
    hello.nonce = nonce;
    hello.proof = secret.connector;
    hello.from = incarnation_;
    hello.to = selfIncarnation();
    hello.rank = rank_;
    hello.channel = 2;
    line.write(encodeHello(hello));
    return line;
  }

  // The next connection to this peer's port, and what it says.
  RawConnection accept(Hello* hello) const {
    pollfd entry{acceptor_->fd.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&entry, 1, static_cast<int>(milliseconds(kTestPatience).count())), 1);
    RawConnection line(acceptOne(acceptor_->fd.get()));
    const RawConnection::Frame frame = line.read();
    *hello = decodeHello(frame.payload).value_or(Hello{});
    return line;
  }
  bool isAsked() const {
    pollfd entry{acceptor_->fd.get(), POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  }
  void answerProbe(RefusalCode code) const {
    Hello hello;
    RawConnection line = accept(&hello);
    while (!hello.nonce.isZero()) line = accept(&hello);  // a dial, not a probe
    line.write(encodeRefusal({code, "test"}));
  }
  std::string welcome(const GenerationSecret& secret) const {
    return encodeWelcome({secret.acceptor, incarnation_});
  }

  const Incarnation& incarnation() const { return incarnation_; }

 private:
  const int rank_;
  Incarnation incarnation_;
  std::optional<ListeningSocket> acceptor_;
};

}  // namespace torchft_ext
