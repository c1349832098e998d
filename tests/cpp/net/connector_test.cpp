// The connector: what it tries again, what ends it, and whom it believes.
#include "net/connector.h"

#include <gtest/gtest.h>

#include "cpp/support/net_support.h"
#include "net/local_address.h"

namespace torchft_ext {
namespace {

using namespace net_test;  // NOLINT(google-build-using-namespace)

struct Generation {
  Nonce nonce = Nonce::random();
  GenerationSecret secret = GenerationSecret::random();
  Incarnation acceptor = Incarnation::random();

  Hello hello() const { return {nonce, secret.connector, selfIncarnation(), acceptor, 1, 0}; }
  Welcome welcome() const { return {secret.acceptor, acceptor}; }
};

// A port that nobody listens on, and that nobody else can take meanwhile.
struct ClosedPort {
  UniqueFd holder{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  SocketAddress address;
  ClosedPort() {
    EXPECT_EQ(::bind(holder.get(), loopbackAddress().raw(), loopbackAddress().rawLength()), 0);
    address = *localAddressOfSocket(holder.get());
  }
};

void flush(Caller& caller) {
  onLoop(caller.loop, [] {});
  onLoop(caller.loop, [] {});
}

TEST(Connector, SaysItsHelloAndBelievesTheRightWelcome) {
  const Generation generation;
  RawAcceptor acceptor;
  Caller caller;
  caller.connect({acceptor.address()}, generation.hello(), generation.welcome());
  RawPeer peer = acceptor.accept();
  const std::string hello = encodeHello(generation.hello());
  EXPECT_EQ(peer.readBytes(hello.size()), hello);
  peer.say(encodeWelcome(generation.welcome()) + "data");
  ASSERT_TRUE(caller.result().fd) << caller.result().error;
  RawPeer connected(std::move(caller.result().fd));
  EXPECT_EQ(connected.readBytes(4), "data");
}

TEST(Connector, KeepsTryingUntilSomebodyListens) {
  const Generation generation;
  const ClosedPort port;
  Caller caller;
  caller.connect({port.address}, generation.hello(), generation.welcome());
  flush(caller);  // refused at least once by now
  EXPECT_FALSE(caller.ended());
  ASSERT_EQ(::listen(port.holder.get(), 8), 0);
  ASSERT_TRUE(waitReady(port.holder.get(), POLLIN));
  RawPeer(acceptOne(port.holder.get())).say(encodeWelcome(generation.welcome()));
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
}

TEST(Connector, TimesOutAndNamesTheLastError) {
  const Generation generation;
  const ClosedPort port;
  Caller caller;
  caller.connect({port.address}, generation.hello(), generation.welcome(),
                 Deadline::after(milliseconds(30)));
  const auto& result = caller.result();
  EXPECT_FALSE(result.fd);
  EXPECT_TRUE(result.timed_out);
  EXPECT_NE(result.error.find(port.address.toString()), std::string::npos) << result.error;
  EXPECT_NE(result.error.find("refused"), std::string::npos) << result.error;
}

TEST(Connector, TimesOutOnAPeerThatNeverAnswers) {
  const Generation generation;
  RawAcceptor acceptor;
  Caller caller;
  caller.connect({acceptor.address()}, generation.hello(), generation.welcome(),
                 Deadline::after(milliseconds(100)));
  EXPECT_FALSE(caller.result().fd);
  EXPECT_TRUE(caller.result().timed_out);
}

TEST(Connector, TriesAgainWhenTheGenerationIsUnknownOrTheConnectionBreaks) {
  const Generation generation;
  RawAcceptor acceptor;
  Caller caller;
  caller.connect({acceptor.address()}, generation.hello(), generation.welcome());
  acceptor.accept().say(encodeRefusal({RefusalCode::kUnknownGeneration, "not yet"}));
  acceptor.accept().close();
  RawPeer third = acceptor.accept();
  third.say(encodeWelcome(generation.welcome()));
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
}

TEST(Connector, GivesUpAtOnceOnARefusalThatWillNotChange) {
  for (const RefusalCode code : {RefusalCode::kWrongSecret, RefusalCode::kWrongProcess,
                                 RefusalCode::kDuplicate, RefusalCode::kWrongVersion}) {
    const Generation generation;
    RawAcceptor acceptor;
    Caller caller;
    caller.connect({acceptor.address()}, generation.hello(), generation.welcome());
    RawPeer peer = acceptor.accept();
    peer.say(encodeRefusal({code, "the reason"}));
    EXPECT_FALSE(caller.result().fd);
    EXPECT_FALSE(caller.result().timed_out);
    EXPECT_NE(caller.result().error.find("the reason"), std::string::npos) << caller.result().error;
  }
}

TEST(Connector, DoesNotBelieveAWrongAnswer) {
  const Generation generation;
  Welcome wrong_secret = generation.welcome();
  wrong_secret.proof = GenerationSecret::random().acceptor;
  Welcome wrong_process = generation.welcome();
  wrong_process.from = Incarnation::random();
  std::string wrong_version = encodeWelcome(generation.welcome());
  wrong_version[4] = 9;
  const std::vector<std::pair<std::string, std::string>> answers{
      {encodeWelcome(wrong_secret), "secret"},
      {encodeWelcome(wrong_process), wrong_process.from.hex()},
      {wrong_version, "found 9"},
      {"HTTP/1.1 400 Bad Request, and more than a header's worth", "not a frame"},
      {encodeHello(generation.hello()), "unexpected frame"}};
  for (const auto& [answer, word] : answers) {
    RawAcceptor acceptor;
    Caller caller;
    caller.connect({acceptor.address()}, generation.hello(), generation.welcome());
    RawPeer peer = acceptor.accept();
    peer.say(answer);
    EXPECT_FALSE(caller.result().fd);
    EXPECT_FALSE(caller.result().timed_out);
    EXPECT_NE(caller.result().error.find(word), std::string::npos) << caller.result().error;
  }
}

TEST(Connector, TakesTheNextAddressWhenOneRefuses) {
  const Generation generation;
  const ClosedPort closed;
  RawAcceptor stranger;
  RawAcceptor acceptor;
  Caller caller;
  caller.connect({closed.address, stranger.address(), acceptor.address()}, generation.hello(),
                 generation.welcome());
  RawPeer wrong = stranger.accept();
  wrong.say(encodeRefusal({RefusalCode::kWrongProcess, "somebody else"}));
  RawPeer right = acceptor.accept();
  right.say(encodeWelcome(generation.welcome()));
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
}

// A listening socket whose queue is full: the kernel turns the next one away at once.
struct FullAcceptor {
  SocketAddress address = *newLocalAddress();
  UniqueFd listening{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  std::vector<UniqueFd> waiting;
  FullAcceptor() {
    EXPECT_EQ(::bind(listening.get(), address.raw(), address.rawLength()), 0);
    EXPECT_EQ(::listen(listening.get(), 0), 0);
    while (UniqueFd next = startConnect(address, nullptr)) waiting.push_back(std::move(next));
  }
};

TEST(Connector, TakesTcpWhereTheLocalAddressCannotBeHad) {
  const FullAcceptor full;
  for (const SocketAddress& local : {*newLocalAddress(), full.address}) {
    const Generation generation;
    RawAcceptor acceptor;
    Caller caller;
    caller.connect({local, acceptor.address()}, generation.hello(), generation.welcome());
    acceptor.accept().say(encodeWelcome(generation.welcome()));
    EXPECT_TRUE(caller.result().fd) << caller.result().error;
  }
}

// That somebody listens by that name here, which cannot be, shows that it is not even tried.
TEST(Connector, DoesNotTryALocalAddressOfAnotherHost) {
  std::string elsewhere = newLocalAddress()->localName();
  elsewhere[0] = elsewhere[0] == '0' ? '1' : '0';
  const Generation generation;
  const SocketAddress local = *SocketAddress::fromLocalName(elsewhere);
  const auto foreign = listenOn(local, {}, nullptr);
  RawAcceptor acceptor;
  Caller caller;
  caller.connect({local, acceptor.address()}, generation.hello(), generation.welcome());
  acceptor.accept().say(encodeWelcome(generation.welcome()));
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
  EXPECT_FALSE(acceptOne(foreign->fd.get()));
}

// It is the right process, which does not know the generation yet: by TCP it would say the same.
TEST(Connector, AsksAgainWhereTheGenerationWasUnknown) {
  const Generation generation;
  RawAcceptor local(*newLocalAddress());
  const auto port = listenOn(loopbackAddress(), {}, nullptr);
  Caller caller;
  caller.connect({local.address(), port->address}, generation.hello(), generation.welcome());
  for (int i = 0; i < 3; ++i) {
    RawPeer peer = local.accept();
    peer.readBytes(encodeHello(generation.hello()).size());  // as a listener does before it answers
    peer.say(encodeRefusal({RefusalCode::kUnknownGeneration, "not yet"}));
  }
  RawPeer last = local.accept();
  last.say(encodeWelcome(generation.welcome()));
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
  EXPECT_FALSE(acceptOne(port->fd.get()));
}

// Somebody has taken the name; the process that we look for is where its port is.
TEST(Connector, TakesTcpWhereSomebodyElseAnswersLocally) {
  const Generation generation;
  const SocketAddress local = *newLocalAddress();
  RawAcceptor stranger(local);
  RawAcceptor acceptor;
  Caller caller;
  caller.connect({local, acceptor.address()}, generation.hello(), generation.welcome());
  RawPeer wrong = stranger.accept();
  wrong.readBytes(encodeHello(generation.hello()).size());
  wrong.say(encodeRefusal({RefusalCode::kWrongProcess, "somebody else"}));
  acceptor.accept().say(encodeWelcome(generation.welcome()));
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
}

TEST(Connector, FailsWithoutAnAddressThatItCanReach) {
  const Generation generation;
  Caller caller;
  caller.connect({*SocketAddress::fromLocalName("elsewhere")}, generation.hello(),
                 generation.welcome());
  EXPECT_FALSE(caller.result().fd);
  EXPECT_NE(caller.result().error.find("no address that can be reached"), std::string::npos)
      << caller.result().error;
}

TEST(Connector, FailsWithoutAnyAddress) {
  const Generation generation;
  Caller caller;
  caller.connect({}, generation.hello(), generation.welcome());
  EXPECT_FALSE(caller.result().fd);
  EXPECT_FALSE(caller.result().timed_out);
  EXPECT_FALSE(caller.result().error.empty());
}

TEST(Connector, NeverCallsBackOnceDestroyed) {
  const Generation generation;
  RawAcceptor acceptor;
  Caller caller;
  caller.connect({acceptor.address()}, generation.hello(), generation.welcome());
  RawPeer peer = acceptor.accept();
  caller.cancel();
  const std::string hello = encodeHello(generation.hello());
  EXPECT_LE(peer.readToEnd().size(), hello.size()) << "and the connection is closed";
  flush(caller);
  EXPECT_EQ(caller.calls(), 0);
}

TEST(Connector, MayBeDestroyedByItsCallback) {
  const Generation generation;
  RawAcceptor acceptor;
  Caller caller;
  caller.destroy_in_callback = true;
  caller.connect({acceptor.address()}, generation.hello(), generation.welcome());
  RawPeer peer = acceptor.accept();
  peer.say(encodeWelcome(generation.welcome()));
  EXPECT_TRUE(caller.result().fd) << caller.result().error;
  flush(caller);
  EXPECT_EQ(caller.calls(), 1);
}

TEST(Connector, EndsQuietlyWithItsLoop) {
  const Generation generation;
  RawAcceptor acceptor;
  Caller caller;
  caller.connect({acceptor.address()}, generation.hello(), generation.welcome());
  RawPeer peer = acceptor.accept();
  ASSERT_TRUE(caller.loop.stop(testDeadline()));
  peer.readToEnd();
  EXPECT_EQ(caller.calls(), 0);
}

}  // namespace
}  // namespace torchft_ext
