// For tests of listener and connector: an acceptor with what it admitted, and both ends of a
// connection played by hand.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "cpp/support/wait_for.h"
#include "net/connector.h"
#include "net/frame.h"
#include "net/frame_inbox.h"
#include "net/listener.h"

namespace torchft_ext::net_test {

inline SocketAddress loopbackAddress() {
  return *SocketAddress::fromNumeric("127.0.0.1", 0);
}

inline bool waitReady(int fd, short events) {
  pollfd entry{fd, events, 0};
  return ::poll(&entry, 1, static_cast<int>(milliseconds(kTestPatience).count())) == 1;
}

inline void onLoop(EventLoop& loop, EventLoop::Task task) {
  ASSERT_TRUE(loop.runOnLoop(std::move(task), testDeadline()));
}

// A connection played by the test itself.
class RawPeer {
 public:
  RawPeer() = default;
  explicit RawPeer(UniqueFd fd) : fd_(std::move(fd)) {}
  explicit RawPeer(const SocketAddress& address) : fd_(startConnect(address, nullptr)) {
    EXPECT_TRUE(fd_ && waitReady(fd_.get(), POLLOUT));
  }

  void say(const std::string& bytes) { EXPECT_TRUE(sendWhole(fd_.get(), bytes)); }
  // All that comes until the other side closes. A reset counts as an end.
  std::string readToEnd() {
    std::string all;
    while (receive(&all, 4096)) {
    }
    return all;
  }
  std::string readBytes(size_t count) {
    std::string all;
    while (all.size() < count && receive(&all, count - all.size())) {
    }
    return all;
  }
  bool stillOpen() {
    pollfd entry{fd_.get(), POLLIN | POLLRDHUP, 0};
    return ::poll(&entry, 1, 0) == 0;
  }
  void close() { fd_.reset(); }
  int fd() const { return fd_.get(); }

 private:
  bool receive(std::string* all, size_t most) {
    std::string chunk(most, '\0');
    if (!waitReady(fd_.get(), POLLIN)) {
      ADD_FAILURE() << "nothing came, and the connection was not closed";
      return false;
    }
    const ssize_t got = ::recv(fd_.get(), chunk.data(), chunk.size(), 0);
    if (got <= 0) return got < 0 && errno == EAGAIN;
    all->append(chunk, 0, static_cast<size_t>(got));
    return true;
  }

  UniqueFd fd_;
};

// A listening socket that answers only as the test says.
class RawAcceptor {
 public:
  explicit RawAcceptor(const SocketAddress& address = loopbackAddress())
      : listening_(*listenOn(address, {}, nullptr)) {}
  const SocketAddress& address() const { return listening_.address; }
  RawPeer accept() {
    EXPECT_TRUE(waitReady(listening_.fd.get(), POLLIN));
    return RawPeer(acceptOne(listening_.fd.get()));
  }

 private:
  ListeningSocket listening_;
};

// A listener on a loop of its own, one generation that it may expect, and what it has admitted.
class Acceptor {
 public:
  explicit Acceptor(LoopTraits traits = {},
                    const std::optional<SocketAddress>& local = std::nullopt)
      : loop("ft-test-door", traits) {
    std::string error;
    listener = Listener::open(loop, loopbackAddress(), {}, &error, selfIncarnation(), local);
    EXPECT_TRUE(listener) << error;
  }
  ~Acceptor() {
    loop.runOnLoop([this] { arrivals_.clear(); }, testDeadline());  // closed where they were made
    listener.reset();
  }
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  void expect() {
    onLoop(loop, [this] {
      listener->expect(nonce, secret, [this](Arrival& arrival) { return admit(arrival); });
    });
  }
  void forget() {
    onLoop(loop, [this] { listener->forget(nonce); });
  }
  Hello hello(int rank = 1) const {
    return {nonce, secret.connector, Incarnation::random(), selfIncarnation(), rank, 0};
  }
  Welcome welcome() const { return {secret.acceptor, selfIncarnation()}; }
  SocketAddress address() const { return listener->address(); }

  std::vector<int> admittedRanks() {
    std::vector<int> ranks;
    loop.runOnLoop(
        [&] {
          for (const Arrival& arrival : arrivals_) ranks.push_back(arrival.rank);
        },
        testDeadline());
    return ranks;
  }
  bool waitForAdmitted(size_t count) {
    return waitFor([&] { return admittedRanks().size() == count; });
  }
  bool waitForRefused(uint64_t count) {
    return waitFor([&] { return listener->counts().refused == count; });
  }
  // Sends from the acceptor's side over the first admitted connection.
  void sendFromFirst(const std::string& text) {
    onLoop(loop, [&] { EXPECT_TRUE(sendWhole(arrivals_.at(0).fd.get(), text)); });
  }

  EventLoop loop;
  Nonce nonce = Nonce::random();
  GenerationSecret secret = GenerationSecret::random();
  std::shared_ptr<Listener> listener;
  bool take = true;  // what the handler answers; changed on the loop or before expect()

 private:
  bool admit(Arrival& arrival) {
    if (!take) return false;
    arrivals_.push_back(std::move(arrival));
    return true;
  }
  std::vector<Arrival> arrivals_;  // loop thread only
};

// A connector on a loop of its own, and how it ended.
class Caller {
 public:
  Caller() : loop("ft-test-caller") {}
  ~Caller() {
    loop.runOnLoop([this] { connector_.reset(); }, testDeadline());
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  void connect(std::vector<SocketAddress> addresses, const Hello& hello, const Welcome& expected,
               Deadline deadline = testDeadline()) {
    onLoop(loop, [&] {
      connector_ =
          std::make_unique<Connector>(loop, std::move(addresses), hello, expected, deadline,
                                      [this](Connector::Result result) { end(std::move(result)); });
      EXPECT_FALSE(ended()) << "called back from inside the constructor";
    });
  }
  void connect(const Acceptor& acceptor, int rank = 1, Deadline deadline = testDeadline()) {
    connect({acceptor.address()}, acceptor.hello(rank), acceptor.welcome(), deadline);
  }
  void connect(const Acceptor& acceptor, const SocketAddress& address, int rank) {
    connect({address}, acceptor.hello(rank), acceptor.welcome());
  }
  void cancel() {
    onLoop(loop, [this] { connector_.reset(); });
  }
  bool ended() {
    MutexLock lock(mutex_);
    return calls_ > 0;
  }
  int calls() {
    MutexLock lock(mutex_);
    return calls_;
  }
  // Waits for the end.
  Connector::Result& result() {
    EXPECT_TRUE(waitFor([this] { return ended(); })) << "the connector never ended";
    return result_;
  }

  EventLoop loop;
  bool destroy_in_callback = false;

 private:
  void end(Connector::Result result) {
    if (destroy_in_callback) connector_.reset();
    MutexLock lock(mutex_);
    ++calls_;
    result_ = std::move(result);
  }

  std::unique_ptr<Connector> connector_;  // loop thread only
  Mutex mutex_;
  int calls_ GUARDED_BY(mutex_) = 0;
  Connector::Result result_;  // written once, before calls_ is counted
};

// Reads the one refusal that a frame holds.
inline std::optional<Refusal> refusalIn(const std::string& frame) {
  if (frame.size() < kFrameHeaderBytes) return std::nullopt;
  return decodeRefusal(std::string_view(frame).substr(kFrameHeaderBytes));
}

}  // namespace torchft_ext::net_test
