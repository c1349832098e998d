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
#include "net/local_address.h"
#include "net_support.h"

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
  Door door;
  Caller caller;
  door.expect();
  caller.connect(door, 3);
  ASSERT_TRUE(caller.result().fd) << caller.result().error;
  ASSERT_TRUE(door.waitForAdmitted(1));
  EXPECT_EQ(door.admittedRanks(), std::vector<int>{3});
  EXPECT_EQ(door.listener->counts().admitted, 1U);
  EXPECT_EQ(door.listener->counts().refused, 0U);
}

TEST(Listener, NothingBeyondTheHandshakeIsReadByEitherSide) {
  Door door;
  door.expect();
  RawPeer peer(door.address());
  peer.say(encodeHello(door.hello()) + "data");
  ASSERT_TRUE(door.waitForAdmitted(1));
  door.sendFromFirst("answer");
  const std::string welcome = encodeWelcome(door.welcome());
  EXPECT_EQ(peer.readBytes(welcome.size()), welcome);
  EXPECT_EQ(peer.readBytes(6), "answer");
}

TEST(Listener, AdmitsOverAPrivateTable) {
  Door door({.private_table = true});
  Caller caller;
  door.expect();
  caller.connect(door);
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
  EXPECT_TRUE(door.waitForAdmitted(1));
}

TEST(Listener, RefusesAWrongSecret) {
  Door door;
  Caller caller;
  door.expect();
  Hello hello = door.hello();
  hello.proof = GenerationSecret::random().connector;
  caller.connect({door.address()}, hello, door.welcome());
  EXPECT_FALSE(caller.result().fd);
  EXPECT_FALSE(caller.result().timed_out);
  EXPECT_NE(caller.result().error.find("secret"), std::string::npos) << caller.result().error;
  EXPECT_TRUE(door.waitForRefused(1));
  EXPECT_TRUE(door.admittedRanks().empty());
}

TEST(Listener, RefusesAHelloForAnotherProcess) {
  Door door;
  Caller caller;
  door.expect();
  Hello hello = door.hello();
  hello.to = Incarnation::random();
  caller.connect({door.address()}, hello, door.welcome());
  EXPECT_FALSE(caller.result().fd);
  EXPECT_FALSE(caller.result().timed_out);
  EXPECT_NE(caller.result().error.find("another process"), std::string::npos)
      << caller.result().error;
}

TEST(Listener, TellsAnotherWireVersionWhyItIsRefused) {
  Door door;
  door.expect();
  RawPeer peer(door.address());
  std::string hello = encodeHello(door.hello());
  hello[4] = 9;
  peer.say(hello);
  const auto refusal = refusalIn(peer.readBytes(kFrameHeaderBytes) + peer.readToEnd());
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->code, RefusalCode::kWrongVersion);
  EXPECT_NE(refusal->reason.find("found 9"), std::string::npos) << refusal->reason;
}

TEST(Listener, ClosesOnGarbageWithoutAnAnswer) {
  Door door;
  door.expect();
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n"), std::string(4000, '\0'),
        headerOf(FrameType::kData, 8), headerOf(FrameType::kHello, ~0ULL),
        headerOf(FrameType::kHello, 4) + "abcd"}) {
    RawPeer peer(door.address());
    peer.say(bytes);
    EXPECT_EQ(peer.readToEnd(), "");
  }
  EXPECT_TRUE(door.waitForRefused(5));
  EXPECT_TRUE(door.admittedRanks().empty());
}

TEST(Listener, ClosesOnPeersThatAreSilentOrTooSlow) {
  Door door;
  door.expect();
  const auto began = Clock::now();
  RawPeer silent(door.address());
  RawPeer slow(door.address());
  const std::string hello = encodeHello(door.hello());
  slow.say(hello.substr(0, hello.size() - 1));
  EXPECT_EQ(silent.readToEnd(), "");
  EXPECT_EQ(slow.readToEnd(), "");
  EXPECT_GE(Clock::now() - began, Listener::kHelloWithin - milliseconds(500));
  EXPECT_TRUE(door.waitForRefused(2));
}

TEST(Listener, AdmitsAHelloThatComesInPieces) {
  Door door;
  door.expect();
  const std::string hello = encodeHello(door.hello());
  const std::string welcome = encodeWelcome(door.welcome());
  bool admitted = false;
  for (int attempt = 0; attempt < 5 && !admitted;
       ++attempt) {  // the machine may stall beyond kHelloWithin
    RawPeer peer(door.address());
    peer.say(hello.substr(0, 10));
    door.admittedRanks();  // the loop has gone round meanwhile
    sendWhole(peer.fd(), hello.substr(10));
    admitted = peer.readBytes(welcome.size()) == welcome;
  }
  EXPECT_TRUE(admitted);
}

TEST(Listener, ParksAConnectionAheadOfItsGeneration) {
  Door door;
  Caller caller;
  caller.connect(door, 5);
  ASSERT_TRUE(waitFor([&] { return door.listener->counts().parked == 1; }));
  EXPECT_TRUE(door.admittedRanks().empty());
  EXPECT_FALSE(caller.ended());
  // The hello has been read once the listener expects the generation, or soon after: admitted
  // either way.
  door.expect();
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
  EXPECT_TRUE(door.waitForAdmitted(1));
}

TEST(Listener, AdmitsParkedConnectionsBeforeExpectReturns) {
  Door door;
  RawPeer early(door.address());
  early.say(encodeHello(door.hello(7)));
  ASSERT_TRUE(waitFor([&] { return door.listener->counts().parked == 1; }));
  size_t admitted_inside = 0;
  onLoop(door.loop, [&] {
    door.listener->expect(door.nonce, door.secret, [&](Arrival&) {
      ++admitted_inside;
      return true;
    });
    EXPECT_EQ(admitted_inside, 1U);
  });
}

TEST(Listener, ParkedConnectionWithAWrongSecretIsRefusedWhenTheGenerationBegins) {
  Door door;
  RawPeer peer(door.address());
  Hello hello = door.hello();
  hello.proof = GenerationSecret::random().connector;
  peer.say(encodeHello(hello));
  ASSERT_TRUE(waitFor([&] { return door.listener->counts().parked == 1; }));
  door.expect();
  const auto refusal = refusalIn(peer.readToEnd());
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->code, RefusalCode::kWrongSecret);
}

TEST(Listener, ParkedConnectionThatLeavesIsDropped) {
  Door door;
  RawPeer peer(door.address());
  peer.say(encodeHello(door.hello()));
  ASSERT_TRUE(waitFor([&] { return door.listener->counts().parked == 1; }));
  peer.close();
  EXPECT_TRUE(door.waitForRefused(1));
  EXPECT_EQ(door.listener->counts().parked, 0U);
  door.expect();
  EXPECT_TRUE(door.admittedRanks().empty());
}

TEST(Listener, ForgottenGenerationIsNotAdmitted) {
  Door door;
  Caller caller;
  door.expect();
  door.forget();
  caller.connect(door, 1, Deadline::after(milliseconds(100)));
  EXPECT_FALSE(caller.result().fd);
  EXPECT_TRUE(caller.result().timed_out);
  EXPECT_TRUE(door.admittedRanks().empty());
}

TEST(Listener, RefusesWhatItsHandlerDoesNotTake) {
  Door door;
  door.take = false;
  door.expect();
  RawPeer peer(door.address());
  peer.say(encodeHello(door.hello()));
  const std::string welcome = encodeWelcome(door.welcome());
  EXPECT_EQ(peer.readBytes(welcome.size()), welcome);
  const auto refusal = refusalIn(peer.readToEnd());
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->code, RefusalCode::kDuplicate);
}

TEST(Listener, SurvivesAHandlerThatThrows) {
  setLogSink([](LogLevel, const std::string&) {});
  Door door;
  onLoop(door.loop, [&] {
    door.listener->expect(door.nonce, door.secret,
                          [](Arrival&) -> bool { throw std::runtime_error("handler"); });
  });
  RawPeer peer(door.address());
  peer.say(encodeHello(door.hello()));
  peer.readToEnd();
  door.expect();
  RawPeer second(door.address());
  second.say(encodeHello(door.hello()));
  EXPECT_TRUE(door.waitForAdmitted(1));
  setLogSink(nullptr);
}

TEST(Listener, OldestStrangerMakesRoomForANewerOne) {
  Door door;
  std::vector<RawPeer> strangers;
  for (int i = 0; i < Listener::kMaxStrangers + 1; ++i) strangers.emplace_back(door.address());
  EXPECT_EQ(strangers.front().readToEnd(), "");
  door.expect();
  strangers.emplace_back(door.address());
  strangers.back().say(encodeHello(door.hello()));
  EXPECT_TRUE(door.waitForAdmitted(1));
}

TEST(Listener, FewerMayWaitWhereTheLimitOfOpenFilesIsLow) {
  rlimit usual{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &usual), 0);
  const rlimit low{256, usual.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  Door door;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &usual), 0);
  constexpr uint64_t kMayWait = 256 / 4;
  const auto began = Clock::now();
  std::vector<RawPeer> early;
  for (uint64_t i = 0; i < kMayWait + 1; ++i) {
    early.emplace_back(door.address());
    early.back().say(encodeHello(door.hello()));
    ASSERT_TRUE(waitFor([&] { return door.listener->counts().accepted == i + 1; }));
  }
  EXPECT_TRUE(refusalIn(early.front().readToEnd()));
  EXPECT_TRUE(waitFor([&] { return door.listener->counts().parked == kMayWait; }));  // the last too
  EXPECT_LT(Clock::now() - began, Listener::kParkedFor) << "it was dismissed for its age";
}

TEST(Listener, ThousandsOfStrangersDoNotDisturbAnAdmittedConnection) {
  Door door;
  door.expect();
  RawPeer admitted(door.address());
  const std::string welcome = encodeWelcome(door.welcome());
  admitted.say(encodeHello(door.hello()));
  ASSERT_EQ(admitted.readBytes(welcome.size()), welcome);
  ASSERT_TRUE(door.waitForAdmitted(1));

  constexpr uint64_t kStrangers = 3000;
  std::thread flood([&] {
    for (uint64_t i = 0; i < kStrangers; ++i) {
      RawPeer stranger(door.address());
      sendWhole(stranger.fd(), i % 2 == 0 ? std::string(200, 'x') : std::string("1XFT"));
    }
  });
  uint64_t exchanges = 0;
  while (door.listener->counts().accepted < kStrangers / 2 || exchanges < 100) {
    door.sendFromFirst("ping");
    ASSERT_EQ(admitted.readBytes(4), "ping");
    ++exchanges;
  }
  Caller caller;
  caller.connect(door, 2);
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
  flood.join();
  EXPECT_TRUE(admitted.stillOpen());
  EXPECT_TRUE(door.waitForAdmitted(2));
  EXPECT_TRUE(door.waitForRefused(kStrangers));
}

std::atomic<int> accept_warnings{0};

TEST(Listener, GoesOnAcceptingOnceDescriptorsAreFreeAgain) {
  accept_warnings = 0;
  setLogSink([](LogLevel, const std::string& line) {
    if (line.find("cannot accept") != std::string::npos) ++accept_warnings;
  });
  Door door;
  door.expect();
  RawPeer peer(UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  {
    const UniqueFd lowest_free(::dup(peer.fd()));
    none.rlim_cur = static_cast<rlim_t>(lowest_free.get());
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const SocketAddress address = door.address();
  EXPECT_EQ(::connect(peer.fd(), address.raw(), address.rawLength()), 0);
  const bool warned = waitFor([] { return accept_warnings == 1; });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(warned);
  peer.say(encodeHello(door.hello()));
  EXPECT_TRUE(door.waitForAdmitted(1));
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
    Door door({}, newLocalAddress());
    RawPeer silent(door.listener->addresses().front());
    RawPeer parked(door.address());
    parked.say(encodeHello(door.hello()));
    ASSERT_TRUE(waitFor([&] { return door.listener->counts().parked == 1; }));
    door.listener.reset();
    EXPECT_EQ(silent.readToEnd(), "");
    EXPECT_EQ(parked.readToEnd(), "");
  }
  EXPECT_EQ(openDescriptors(), without_door);
}

TEST(Listener, MayBeDestroyedByItsHandler) {
  Door door;
  std::atomic<bool> destroyed{false};
  onLoop(door.loop, [&] {
    door.listener->expect(door.nonce, door.secret, [&](Arrival&) {
      door.listener.reset();
      destroyed = true;
      return true;
    });
  });
  RawPeer peer(door.address());
  peer.say(encodeHello(door.hello()));
  EXPECT_TRUE(waitFor([&] { return destroyed.load(); }));
  peer.readToEnd();
}

TEST(Listener, MayBeDestroyedAfterItsLoopHasStopped) {
  Door door({.private_table = true});
  RawPeer stranger(door.address());
  ASSERT_TRUE(door.loop.stop(testDeadline()));
  EXPECT_EQ(stranger.readToEnd(), "");
  door.listener.reset();
}

TEST(Listener, TellsWhyNoPortCanBeHad) {
  Door door;
  const uint16_t taken = door.address().port();
  std::string error;
  EXPECT_FALSE(Listener::open(door.loop, loopbackAddress(), {taken, taken}, &error));
  EXPECT_NE(error.find(std::to_string(taken)), std::string::npos) << error;
  ASSERT_TRUE(door.loop.stop(testDeadline()));
  EXPECT_FALSE(Listener::open(door.loop, loopbackAddress(), {}, &error));
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
  Door door;
  auto told = std::make_shared<std::vector<std::string>>();
  std::atomic<int> calls{0};
  onLoop(door.loop, [&] {
    door.listener->expect(
        door.nonce, door.secret, [](Arrival&) { return false; },
        [told, &calls](const std::string& why) {
          told->push_back(why);
          ++calls;
        });
  });
  RawPeer peer(UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  const SocketAddress address = door.address();
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
  Door door;
  std::atomic<bool> told{false};
  std::vector<Arrival> inside;
  onLoop(door.loop, [&] {
    const auto keep = [&inside](Arrival& arrival) {
      inside.push_back(std::move(arrival));
      return true;
    };
    door.listener->expect(door.nonce, door.secret, keep,
                          [&told](const std::string&) { told = true; });
  });
  RawPeer first(UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  RawPeer second(UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  const SocketAddress address = door.address();
  Clock::time_point came;
  {
    const NoDescriptorLeft none(/*but=*/1);
    EXPECT_EQ(::connect(first.fd(), address.raw(), address.rawLength()), 0);
    first.say(encodeHello(door.hello()));
    EXPECT_TRUE(waitFor([&] { return door.listener->counts().admitted == 1; }));
    const Deadline long_ago = Deadline::after(kLacksFor + milliseconds(50));
    EXPECT_TRUE(waitFor([&] { return long_ago.expired(); }));
    came = Clock::now();
    EXPECT_EQ(::connect(second.fd(), address.raw(), address.rawLength()), 0);
    EXPECT_TRUE(waitFor([&] { return told.load(); }));
  }
  EXPECT_GE(Clock::now() - came, kLacksFor);
  onLoop(door.loop, [&] { inside.clear(); });
  setLogSink(nullptr);
}

TEST(Connector, FailsOnceItHasHadNoDescriptorForASecond) {
  Door door;
  door.expect();
  Caller caller;
  const auto began = Clock::now();
  {
    const NoDescriptorLeft none;
    caller.connect(door, 1);
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
