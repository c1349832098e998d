// The listener: whom it admits, and the strangers it turns away.
#include "net/listener.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/shortage.h"
#include "cpp/support/net_support.h"
#include "net/local_address.h"

namespace torchft_ext {
namespace {

using namespace net_test;  // NOLINT(google-build-using-namespace)

std::string bytesOf(const FrameBytes& bytes) {
  return {bytes.begin(), bytes.end()};
}

std::string headerOf(FrameType type, uint64_t length) {
  FrameHeader header;
  header.type = type;
  header.length = length;
  return bytesOf(encodeHeader(header));
}

TEST(Listener, AdmitsAPeerThatKnowsTheSecret) {
  Acceptor acceptor;
  Caller caller;
  acceptor.expect();
  caller.connect(acceptor, 3);
  ASSERT_TRUE(caller.result().fd) << caller.result().error;
  ASSERT_TRUE(acceptor.waitForAdmitted(1));
  EXPECT_EQ(acceptor.admittedRanks(), std::vector<int>{3});
  EXPECT_EQ(acceptor.listener->counts().admitted, 1U);
  EXPECT_EQ(acceptor.listener->counts().refused, 0U);
}

TEST(Listener, NothingBeyondTheHandshakeIsReadByEitherSide) {
  Acceptor acceptor;
  acceptor.expect();
  RawPeer peer(acceptor.address());
  peer.say(encodeHello(acceptor.hello()) + "data");
  ASSERT_TRUE(acceptor.waitForAdmitted(1));
  acceptor.sendFromFirst("answer");
  const std::string welcome = encodeWelcome(acceptor.welcome());
  EXPECT_EQ(peer.readBytes(welcome.size()), welcome);
  EXPECT_EQ(peer.readBytes(6), "answer");
}

TEST(Listener, AdmitsOverAPrivateTable) {
  Acceptor acceptor({.private_table = true});
  Caller caller;
  acceptor.expect();
  caller.connect(acceptor);
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
  EXPECT_TRUE(acceptor.waitForAdmitted(1));
}

TEST(Listener, RefusesAWrongSecret) {
  Acceptor acceptor;
  Caller caller;
  acceptor.expect();
  Hello hello = acceptor.hello();
  hello.proof = GenerationSecret::random().connector;
  caller.connect({acceptor.address()}, hello, acceptor.welcome());
  EXPECT_FALSE(caller.result().fd);
  EXPECT_FALSE(caller.result().timed_out);
  EXPECT_NE(caller.result().error.find("secret"), std::string::npos) << caller.result().error;
  EXPECT_TRUE(acceptor.waitForRefused(1));
  EXPECT_TRUE(acceptor.admittedRanks().empty());
}

TEST(Listener, RefusesAHelloForAnotherProcess) {
  Acceptor acceptor;
  Caller caller;
  acceptor.expect();
  Hello hello = acceptor.hello();
  hello.to = Incarnation::random();
  caller.connect({acceptor.address()}, hello, acceptor.welcome());
  EXPECT_FALSE(caller.result().fd);
  EXPECT_FALSE(caller.result().timed_out);
  EXPECT_NE(caller.result().error.find("another process"), std::string::npos)
      << caller.result().error;
}

TEST(Listener, TellsAnotherWireVersionWhyItIsRefused) {
  Acceptor acceptor;
  acceptor.expect();
  RawPeer peer(acceptor.address());
  std::string hello = encodeHello(acceptor.hello());
  hello[4] = 9;
  peer.say(hello);
  const auto refusal = refusalIn(peer.readBytes(kFrameHeaderBytes) + peer.readToEnd());
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->code, RefusalCode::kWrongVersion);
  EXPECT_NE(refusal->reason.find("found 9"), std::string::npos) << refusal->reason;
}

TEST(Listener, ClosesOnGarbageWithoutAnAnswer) {
  Acceptor acceptor;
  acceptor.expect();
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n"), std::string(4000, '\0'),
        headerOf(FrameType::kData, 8), headerOf(FrameType::kHello, ~0ULL),
        headerOf(FrameType::kHello, 4) + "abcd"}) {
    RawPeer peer(acceptor.address());
    peer.say(bytes);
    EXPECT_EQ(peer.readToEnd(), "");
  }
  EXPECT_TRUE(acceptor.waitForRefused(5));
  EXPECT_TRUE(acceptor.admittedRanks().empty());
}

TEST(Listener, ClosesOnPeersThatAreSilentOrTooSlow) {
  Acceptor acceptor;
  acceptor.expect();
  const auto began = Clock::now();
  RawPeer silent(acceptor.address());
  RawPeer slow(acceptor.address());
  const std::string hello = encodeHello(acceptor.hello());
  slow.say(hello.substr(0, hello.size() - 1));
  EXPECT_EQ(silent.readToEnd(), "");
  EXPECT_EQ(slow.readToEnd(), "");
  EXPECT_GE(Clock::now() - began, Listener::kHelloWithin - milliseconds(500));
  EXPECT_TRUE(acceptor.waitForRefused(2));
}

TEST(Listener, AdmitsAHelloThatComesInPieces) {
  Acceptor acceptor;
  acceptor.expect();
  const std::string hello = encodeHello(acceptor.hello());
  const std::string welcome = encodeWelcome(acceptor.welcome());
  bool admitted = false;
  for (int attempt = 0; attempt < 5 && !admitted;
       ++attempt) {  // the machine may stall beyond kHelloWithin
    RawPeer peer(acceptor.address());
    peer.say(hello.substr(0, 10));
    acceptor.admittedRanks();  // the loop has gone round meanwhile
    sendWhole(peer.fd(), hello.substr(10));
    admitted = peer.readBytes(welcome.size()) == welcome;
  }
  EXPECT_TRUE(admitted);
}

TEST(Listener, ParksAConnectionAheadOfItsGeneration) {
  Acceptor acceptor;
  Caller caller;
  caller.connect(acceptor, 5);
  ASSERT_TRUE(waitFor([&] { return acceptor.listener->counts().parked == 1; }));
  EXPECT_TRUE(acceptor.admittedRanks().empty());
  EXPECT_FALSE(caller.ended());
  // The hello has been read once the listener expects the generation, or soon after: admitted
  // either way.
  acceptor.expect();
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
  EXPECT_TRUE(acceptor.waitForAdmitted(1));
}

TEST(Listener, AdmitsParkedConnectionsBeforeExpectReturns) {
  Acceptor acceptor;
  RawPeer early(acceptor.address());
  early.say(encodeHello(acceptor.hello(7)));
  ASSERT_TRUE(waitFor([&] { return acceptor.listener->counts().parked == 1; }));
  size_t admitted_inside = 0;
  onLoop(acceptor.loop, [&] {
    acceptor.listener->expect(acceptor.nonce, acceptor.secret, [&](Arrival&) {
      ++admitted_inside;
      return true;
    });
    EXPECT_EQ(admitted_inside, 1U);
  });
}

TEST(Listener, ParkedConnectionWithAWrongSecretIsRefusedWhenTheGenerationBegins) {
  Acceptor acceptor;
  RawPeer peer(acceptor.address());
  Hello hello = acceptor.hello();
  hello.proof = GenerationSecret::random().connector;
  peer.say(encodeHello(hello));
  ASSERT_TRUE(waitFor([&] { return acceptor.listener->counts().parked == 1; }));
  acceptor.expect();
  const auto refusal = refusalIn(peer.readToEnd());
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->code, RefusalCode::kWrongSecret);
}

TEST(Listener, ParkedConnectionThatLeavesIsDropped) {
  Acceptor acceptor;
  RawPeer peer(acceptor.address());
  peer.say(encodeHello(acceptor.hello()));
  ASSERT_TRUE(waitFor([&] { return acceptor.listener->counts().parked == 1; }));
  peer.close();
  EXPECT_TRUE(acceptor.waitForRefused(1));
  EXPECT_EQ(acceptor.listener->counts().parked, 0U);
  acceptor.expect();
  EXPECT_TRUE(acceptor.admittedRanks().empty());
}

TEST(Listener, ForgottenGenerationIsNotAdmitted) {
  Acceptor acceptor;
  Caller caller;
  acceptor.expect();
  acceptor.forget();
  caller.connect(acceptor, 1, Deadline::after(milliseconds(100)));
  EXPECT_FALSE(caller.result().fd);
  EXPECT_TRUE(caller.result().timed_out);
  EXPECT_TRUE(acceptor.admittedRanks().empty());
}

TEST(Listener, RefusesWhatItsHandlerDoesNotTake) {
  Acceptor acceptor;
  acceptor.take = false;
  acceptor.expect();
  RawPeer peer(acceptor.address());
  peer.say(encodeHello(acceptor.hello()));
  const std::string welcome = encodeWelcome(acceptor.welcome());
  EXPECT_EQ(peer.readBytes(welcome.size()), welcome);
  const auto refusal = refusalIn(peer.readToEnd());
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->code, RefusalCode::kDuplicate);
}

TEST(Listener, SurvivesAHandlerThatThrows) {
  setLogSink([](LogLevel, const std::string&) {});
  Acceptor acceptor;
  onLoop(acceptor.loop, [&] {
    acceptor.listener->expect(acceptor.nonce, acceptor.secret,
                              [](Arrival&) -> bool { throw std::runtime_error("handler"); });
  });
  RawPeer peer(acceptor.address());
  peer.say(encodeHello(acceptor.hello()));
  peer.readToEnd();
  acceptor.expect();
  RawPeer second(acceptor.address());
  second.say(encodeHello(acceptor.hello()));
  EXPECT_TRUE(acceptor.waitForAdmitted(1));
  setLogSink(nullptr);
}

TEST(Listener, OldestStrangerMakesRoomForANewerOne) {
  Acceptor acceptor;
  std::vector<RawPeer> strangers;
  for (int i = 0; i < Listener::kMaxStrangers + 1; ++i) strangers.emplace_back(acceptor.address());
  EXPECT_EQ(strangers.front().readToEnd(), "");
  acceptor.expect();
  strangers.emplace_back(acceptor.address());
  strangers.back().say(encodeHello(acceptor.hello()));
  EXPECT_TRUE(acceptor.waitForAdmitted(1));
}

TEST(Listener, FewerMayWaitWhereTheLimitOfOpenFilesIsLow) {
  rlimit usual{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &usual), 0);
  const rlimit low{256, usual.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  Acceptor acceptor;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &usual), 0);
  constexpr uint64_t kMayWait = 256 / 4;
  const auto began = Clock::now();
  std::vector<RawPeer> early;
  for (uint64_t i = 0; i < kMayWait + 1; ++i) {
    early.emplace_back(acceptor.address());
    early.back().say(encodeHello(acceptor.hello()));
    ASSERT_TRUE(waitFor([&] { return acceptor.listener->counts().accepted == i + 1; }));
  }
  EXPECT_TRUE(refusalIn(early.front().readToEnd()));
  // the last too
  EXPECT_TRUE(waitFor([&] { return acceptor.listener->counts().parked == kMayWait; }));
  EXPECT_LT(Clock::now() - began, Listener::kParkedFor) << "it was dismissed for its age";
}

TEST(Listener, ThousandsOfStrangersDoNotDisturbAnAdmittedConnection) {
  Acceptor acceptor;
  acceptor.expect();
  RawPeer admitted(acceptor.address());
  const std::string welcome = encodeWelcome(acceptor.welcome());
  admitted.say(encodeHello(acceptor.hello()));
  ASSERT_EQ(admitted.readBytes(welcome.size()), welcome);
  ASSERT_TRUE(acceptor.waitForAdmitted(1));

  constexpr uint64_t kStrangers = 3000;
  std::thread flood([&] {
    for (uint64_t i = 0; i < kStrangers; ++i) {
      RawPeer stranger(acceptor.address());
      sendWhole(stranger.fd(), i % 2 == 0 ? std::string(200, 'x') : std::string("1XFT"));
    }
  });
  uint64_t exchanges = 0;
  while (acceptor.listener->counts().accepted < kStrangers / 2 || exchanges < 100) {
    acceptor.sendFromFirst("ping");
    ASSERT_EQ(admitted.readBytes(4), "ping");
    ++exchanges;
  }
  Caller caller;
  caller.connect(acceptor, 2);
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
  flood.join();
  EXPECT_TRUE(admitted.stillOpen());
  EXPECT_TRUE(acceptor.waitForAdmitted(2));
  EXPECT_TRUE(acceptor.waitForRefused(kStrangers));
}

std::atomic<int> accept_warnings{0};

TEST(Listener, GoesOnAcceptingOnceDescriptorsAreFreeAgain) {
  accept_warnings = 0;
  setLogSink([](LogLevel, const std::string& line) {
    if (line.find("cannot accept") != std::string::npos) ++accept_warnings;
  });
  Acceptor acceptor;
  acceptor.expect();
  RawPeer peer(UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  {
    const UniqueFd lowest_free(::dup(peer.fd()));
    none.rlim_cur = static_cast<rlim_t>(lowest_free.get());
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const SocketAddress address = acceptor.address();
  EXPECT_EQ(::connect(peer.fd(), address.raw(), address.rawLength()), 0);
  const bool warned = waitFor([] { return accept_warnings == 1; });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(warned);
  peer.say(encodeHello(acceptor.hello()));
  EXPECT_TRUE(acceptor.waitForAdmitted(1));
  setLogSink(nullptr);
}

size_t openDescriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

TEST(Listener, ClosesAllItsDescriptorsWhenDestroyedOnAnyThread) {
  const size_t without_door = openDescriptors();
  {
    Acceptor acceptor({}, newLocalAddress());
    RawPeer silent(acceptor.listener->addresses().front());
    RawPeer parked(acceptor.address());
    parked.say(encodeHello(acceptor.hello()));
    ASSERT_TRUE(waitFor([&] { return acceptor.listener->counts().parked == 1; }));
    acceptor.listener.reset();
    EXPECT_EQ(silent.readToEnd(), "");
    EXPECT_EQ(parked.readToEnd(), "");
  }
  EXPECT_EQ(openDescriptors(), without_door);
}

TEST(Listener, MayBeDestroyedByItsHandler) {
  Acceptor acceptor;
  std::atomic<bool> destroyed{false};
  onLoop(acceptor.loop, [&] {
    acceptor.listener->expect(acceptor.nonce, acceptor.secret, [&](Arrival&) {
      acceptor.listener.reset();
      destroyed = true;
      return true;
    });
  });
  RawPeer peer(acceptor.address());
  peer.say(encodeHello(acceptor.hello()));
  EXPECT_TRUE(waitFor([&] { return destroyed.load(); }));
  peer.readToEnd();
}

TEST(Listener, MayBeDestroyedAfterItsLoopHasStopped) {
  Acceptor acceptor({.private_table = true});
  RawPeer stranger(acceptor.address());
  ASSERT_TRUE(acceptor.loop.stop(testDeadline()));
  EXPECT_EQ(stranger.readToEnd(), "");
  acceptor.listener.reset();
}

TEST(Listener, TellsWhyNoPortCanBeHad) {
  Acceptor acceptor;
  const uint16_t taken = acceptor.address().port();
  std::string error;
  EXPECT_FALSE(Listener::open(acceptor.loop, loopbackAddress(), {taken, taken}, &error));
  EXPECT_NE(error.find(std::to_string(taken)), std::string::npos) << error;
  ASSERT_TRUE(acceptor.loop.stop(testDeadline()));
  EXPECT_FALSE(Listener::open(acceptor.loop, loopbackAddress(), {}, &error));
}

// Lets a process have no descriptor more than those that are open, for as long as it stands.
class NoDescriptorLeft {
 public:
  explicit NoDescriptorLeft(rlim_t but = 0) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlimit none = before_;
    {
      const UniqueFd lowest_free(::dup(0));
      none.rlim_cur = static_cast<rlim_t>(lowest_free.get()) + but;
    }
    ::setrlimit(RLIMIT_NOFILE, &none);
    limit_ = std::to_string(none.rlim_cur);
  }
  ~NoDescriptorLeft() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptorLeft(const NoDescriptorLeft&) = delete;
  NoDescriptorLeft& operator=(const NoDescriptorLeft&) = delete;
  const std::string& limit() const { return limit_; }

 private:
  rlimit before_{};
  std::string limit_;
};

TEST(Listener, SaysWhatLacksOnceConnectionsHaveWaitedForASecond) {
  setLogSink([](LogLevel, const std::string&) {});
  Acceptor acceptor;
  auto told = std::make_shared<std::vector<std::string>>();
  std::atomic<int> calls{0};
  onLoop(acceptor.loop, [&] {
    acceptor.listener->expect(
        acceptor.nonce, acceptor.secret, [](Arrival&) { return false; },
        [told, &calls](const std::string& why) {
          told->push_back(why);
          ++calls;
        });
  });
  RawPeer peer(UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  const SocketAddress address = acceptor.address();
  const auto began = Clock::now();
  bool said = false;
  std::string limit;
  {
    const NoDescriptorLeft none;
    limit = none.limit();
    EXPECT_EQ(::connect(peer.fd(), address.raw(), address.rawLength()), 0);
    said = waitFor([&] { return calls == 1; });
  }
  setLogSink(nullptr);
  ASSERT_TRUE(said);
  EXPECT_GE(Clock::now() - began, kLacksFor);
  EXPECT_NE(told->front().find("Too many open files"), std::string::npos) << told->front();
  EXPECT_NE(told->front().find("the limit is " + limit), std::string::npos) << told->front();
}

// One that was taken by who came last is no shortage, as long as nobody else comes.
TEST(Listener, CountsAShortageFromWhenSomebodyWaits) {
  setLogSink([](LogLevel, const std::string&) {});
  Acceptor acceptor;
  std::atomic<bool> told{false};
  std::vector<Arrival> inside;
  onLoop(acceptor.loop, [&] {
    const auto keep = [&inside](Arrival& arrival) {
      inside.push_back(std::move(arrival));
      return true;
    };
    acceptor.listener->expect(acceptor.nonce, acceptor.secret, keep,
                              [&told](const std::string&) { told = true; });
  });
  RawPeer first(UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  RawPeer second(UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  const SocketAddress address = acceptor.address();
  Clock::time_point came;
  {
    const NoDescriptorLeft none(/*but=*/1);
    EXPECT_EQ(::connect(first.fd(), address.raw(), address.rawLength()), 0);
    first.say(encodeHello(acceptor.hello()));
    EXPECT_TRUE(waitFor([&] { return acceptor.listener->counts().admitted == 1; }));
    const Deadline long_ago = Deadline::after(kLacksFor + milliseconds(50));
    EXPECT_TRUE(waitFor([&] { return long_ago.expired(); }));
    came = Clock::now();
    EXPECT_EQ(::connect(second.fd(), address.raw(), address.rawLength()), 0);
    EXPECT_TRUE(waitFor([&] { return told.load(); }));
  }
  EXPECT_GE(Clock::now() - came, kLacksFor);
  onLoop(acceptor.loop, [&] { inside.clear(); });
  setLogSink(nullptr);
}

TEST(Connector, FailsOnceItHasHadNoDescriptorForASecond) {
  Acceptor acceptor;
  acceptor.expect();
  Caller caller;
  const auto began = Clock::now();
  {
    const NoDescriptorLeft none;
    caller.connect(acceptor, 1);
    caller.result();
  }
  EXPECT_TRUE(caller.result().starved);
  EXPECT_FALSE(caller.result().timed_out);
  EXPECT_NE(caller.result().error.find("Too many open files"), std::string::npos);
  EXPECT_GE(Clock::now() - began, kLacksFor);
}

// Every new descriptor would have a number from 3 on.
class NoDescriptorAtAll {
 public:
  NoDescriptorAtAll() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlimit none = before_;
    none.rlim_cur = 3;
    ::setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptorAtAll() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  NoDescriptorAtAll(const NoDescriptorAtAll&) = delete;
  NoDescriptorAtAll& operator=(const NoDescriptorAtAll&) = delete;

 private:
  rlimit before_{};
};

TEST(Connector, CountsAShortageFromItsOwnBeginningAfterOneThatIsOver) {
  const Nonce nonce = Nonce::random();
  const auto secret = GenerationSecret::random();
  const auto other = Incarnation::random();
  const std::string not_yet = encodeRefusal({RefusalCode::kUnknownGeneration, "not yet"});
  RawAcceptor acceptor;
  Caller caller;
  {
    const NoDescriptorAtAll none;
    caller.connect({acceptor.address()}, {nonce, secret.connector, selfIncarnation(), other, 1, 0},
                   {secret.acceptor, other});
  }
  const Deadline long_ago = Deadline::after(kLacksFor + milliseconds(50));
  acceptor.accept().say(not_yet);
  RawPeer second = acceptor.accept();
  EXPECT_TRUE(waitFor([&] { return long_ago.expired(); }));
  {
    const NoDescriptorAtAll none;
    second.say(not_yet);
    std::this_thread::sleep_for(milliseconds(100));  // it tries again meanwhile
  }
  EXPECT_FALSE(caller.ended());
  RawPeer third = acceptor.accept();
  third.say(encodeWelcome({secret.acceptor, other}));
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
}

}  // namespace
}  // namespace torchft_ext
