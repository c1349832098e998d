// The question whether a process lives, and whose words count as an answer.
#include "net/probe.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <future>
#include <thread>

#include "cpp/support/net_support.h"

namespace torchft_ext {
namespace {

using namespace net_test;  // NOLINT(google-build-using-namespace)

// A broadcast address, to which the kernel has no route for connections: it says so at once.
SocketAddress nowhere() {
  return *SocketAddress::fromNumeric("127.255.255.255", 4000);
}

// A question under way. Made and destroyed on its loop, as it has to be.
class Asked {
 public:
  Asked(EventLoop& loop, std::vector<SocketAddress> addresses, const Incarnation& who,
        Duration limit = std::chrono::seconds(30))
      : loop_(loop) {
    onLoop(loop_, [&] { start(std::move(addresses), who, limit); });
  }
  ~Asked() { drop(); }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;

  Liveness answer() { return answer_.get_future().get().liveness; }
  void drop() {
    onLoop(loop_, [this] { probe_.reset(); });
  }
  int answers() const { return answers_; }

 private:
  void start(std::vector<SocketAddress> addresses, const Incarnation& who, Duration limit) {
    ProbePatience patience;
    patience.connect = limit;
    probe_ =
        std::make_unique<Probe>(loop_, ProbeQuestion{selfIncarnation(), who, std::move(addresses)},
                                patience, [this](const ProbeAnswer& given) {
                                  ++answers_;
                                  answer_.set_value(given);
                                });
  }

  EventLoop& loop_;
  std::promise<ProbeAnswer> answer_;
  std::atomic<int> answers_{0};
  std::unique_ptr<Probe> probe_;
};

Liveness ask(EventLoop& loop, const SocketAddress& address, const Incarnation& who,
             Duration limit = std::chrono::seconds(30)) {
  return Asked(loop, {address}, who, limit).answer();
}

// A process that answers its first question, some time after it has come.
class SlowPeer {
 public:
  explicit SlowPeer(Duration pause)
      : listening_(listenOn(loopbackAddress(), {}, &error_)), thread_([this, pause] {
          ASSERT_TRUE(listening_) << error_;
          ASSERT_TRUE(waitReady(listening_->fd.get(), POLLIN));
          RawPeer asker(acceptOne(listening_->fd.get()));
          ASSERT_TRUE(waitReady(asker.fd(), POLLIN));
          asked_.set_value();
          std::this_thread::sleep_for(pause);
          asker.say(encodeRefusal({RefusalCode::kUnknownGeneration, "it lives"}));
          asker.readToEnd();
        }) {}
  ~SlowPeer() { thread_.join(); }
  const SocketAddress& address() const { return listening_->address; }
  void awaitQuestion() { asked_.get_future().wait(); }

 private:
  std::string error_;
  std::promise<void> asked_;
  const std::optional<ListeningSocket> listening_;
  std::thread thread_;
};

TEST(Probe, ALivingProcessAnswers) {
  Acceptor acceptor;
  EXPECT_EQ(ask(acceptor.loop, acceptor.address(), selfIncarnation()), Liveness::kAlive);
  EXPECT_EQ(acceptor.listener->counts().parked, 0U);
}

// As an engine's listener does, which answers the member probers of others.
TEST(Probe, AWelcomeIsAnAnswerToo) {
  Acceptor acceptor;
  onLoop(acceptor.loop, [&] {
    acceptor.listener->expect(kProbeNonce, GenerationSecret{}, [](Arrival&) { return false; });
  });
  EXPECT_EQ(ask(acceptor.loop, acceptor.address(), selfIncarnation()), Liveness::kAlive);
  EXPECT_EQ(ask(acceptor.loop, acceptor.address(), Incarnation::random()), Liveness::kGone);
}

TEST(Probe, AnotherProcessAtThePortMeansGone) {
  Acceptor acceptor;
  EXPECT_EQ(ask(acceptor.loop, acceptor.address(), Incarnation::random()), Liveness::kGone);
}

TEST(Probe, AClosedPortMeansGone) {
  Acceptor acceptor;
  std::string error;
  auto listening = listenOn(loopbackAddress(), {}, &error);
  ASSERT_TRUE(listening) << error;
  listening->fd.reset();
  EXPECT_EQ(ask(acceptor.loop, listening->address, selfIncarnation()), Liveness::kGone);
}

// A process that ends: its kernel has accepted, and then closes one socket after the other.
TEST(Probe, ConnectionsThatAllEndWithoutAWordMeanGone) {
  Acceptor acceptor;
  std::string error;
  auto listening = listenOn(loopbackAddress(), {}, &error);
  ASSERT_TRUE(listening) << error;
  std::thread ending([&] {
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(waitReady(listening->fd.get(), POLLIN));
      acceptOne(listening->fd.get());
    }
  });
  EXPECT_EQ(ask(acceptor.loop, listening->address, selfIncarnation()), Liveness::kGone);
  ending.join();
}

// Something cuts a connection: the next one is answered.
TEST(Probe, OneConnectionThatEndsWithoutAWordIsNoDeath) {
  Acceptor acceptor;
  std::string error;
  auto listening = listenOn(loopbackAddress(), {}, &error);
  ASSERT_TRUE(listening) << error;
  std::thread living([&] {
    ASSERT_TRUE(waitReady(listening->fd.get(), POLLIN));
    acceptOne(listening->fd.get());
    ASSERT_TRUE(waitReady(listening->fd.get(), POLLIN));
    const UniqueFd second = acceptOne(listening->fd.get());
    ASSERT_TRUE(
        sendWhole(second.get(), encodeRefusal({RefusalCode::kUnknownGeneration, "it lives"})));
    ASSERT_TRUE(waitReady(second.get(), POLLHUP | POLLIN));
  });
  EXPECT_EQ(ask(acceptor.loop, listening->address, selfIncarnation()), Liveness::kAlive);
  living.join();
}

TEST(Probe, AKernelThatAcceptsForAStoppedProcessMeansSilent) {
  Acceptor acceptor;
  std::string error;
  auto listening = listenOn(loopbackAddress(), {}, &error);
  ASSERT_TRUE(listening) << error;
  EXPECT_EQ(ask(acceptor.loop, listening->address, selfIncarnation(), milliseconds(300)),
            Liveness::kSilent);
}

TEST(Probe, WithoutALimitSilenceIsNoAnswer) {
  Acceptor acceptor;
  SlowPeer slow(milliseconds(300));
  EXPECT_EQ(ask(acceptor.loop, slow.address(), selfIncarnation(), Duration(-1)), Liveness::kAlive);
}

// What an asker learns that is stopped, for longer than its limit, before it could ask.
Liveness askOnceStopped(const SocketAddress& address) {
  EventLoop asking("asking");
  std::unique_ptr<Asked> asked;
  onLoop(asking, [&] {
    asked = std::make_unique<Asked>(asking, std::vector{address}, selfIncarnation(),
                                    milliseconds(1000));
    std::this_thread::sleep_for(milliseconds(1100));  // stopped
  });
  return asked->answer();
}

// The other has not been silent meanwhile.
TEST(Probe, TimeInWhichTheQuestionWasNotAskedIsNoSilence) {
  Liveness given = Liveness::kSilent;
  // A machine that stalls makes a silence of the pause before the answer: then once more.
  for (int round = 0; round < 3 && given == Liveness::kSilent; ++round) {
    SlowPeer slow(milliseconds(300));
    given = askOnceStopped(slow.address());
  }
  EXPECT_EQ(given, Liveness::kAlive);
}

// Both were stopped, as on a machine that was: the answer comes after the limit, and counts.
TEST(Probe, TimeInWhichTheAskerWasStoppedIsNoSilence) {
  Liveness given = Liveness::kSilent;
  for (int round = 0; round < 3 && given != Liveness::kAlive; ++round) {
    SlowPeer slow(milliseconds(1300));
    EventLoop asking("asking");
    Asked asked(asking, {slow.address()}, selfIncarnation(), milliseconds(500));
    slow.awaitQuestion();
    onLoop(asking, [] { std::this_thread::sleep_for(milliseconds(1000)); });
    given = asked.answer();
  }
  EXPECT_EQ(given, Liveness::kAlive);
}

// The same, and the connection was reset meanwhile: nobody listens any more.
TEST(Probe, AConnectionThatEndedWhileTheAskerWasStoppedIsAskedAboutAgain) {
  EventLoop asking("asking");
  auto acceptor = std::make_unique<RawAcceptor>();
  std::unique_ptr<Asked> asked;
  onLoop(asking, [&] {
    asked = std::make_unique<Asked>(asking, std::vector{acceptor->address()}, selfIncarnation(),
                                    milliseconds(300));
    acceptor.reset();
    std::this_thread::sleep_for(milliseconds(400));  // stopped
  });
  EXPECT_EQ(asked->answer(), Liveness::kGone);
}

TEST(Probe, TheNextTryAsksTheNextPort) {
  Acceptor acceptor;
  Asked asked(acceptor.loop, {nowhere(), acceptor.address()}, selfIncarnation());
  EXPECT_EQ(asked.answer(), Liveness::kAlive);
}

TEST(Probe, OneThatIsDestroyedWhileItWaitsForAnAnswerClosesItsConnectionAndSaysNothing) {
  EventLoop asking("asking");
  RawAcceptor acceptor;
  Asked asked(asking, {acceptor.address()}, selfIncarnation());
  RawPeer peer = acceptor.accept();
  peer.readBytes(1);  // it has been asked
  asked.drop();
  peer.readToEnd();
  peer.say(encodeRefusal({RefusalCode::kUnknownGeneration, "it lives"}));
  onLoop(asking, [] {});
  EXPECT_EQ(asked.answers(), 0);
}

// The first try ends at once. Its end, the pause and the next task come in one turn of the loop.
TEST(Probe, OneThatIsDestroyedBeforeItsNextTryAsksNobodyAnyMore) {
  EventLoop asking("asking");
  const auto listening = listenOn(loopbackAddress(), {}, nullptr);
  std::promise<void> later;
  std::unique_ptr<Asked> asked;
  onLoop(asking, [&] {
    asked = std::make_unique<Asked>(asking, std::vector{nowhere(), listening->address},
                                    selfIncarnation());
    asking.post([&] {
      asked->drop();
      asking.runAt(Clock::now() + milliseconds(100), [&] { later.set_value(); });
    });
  });
  later.get_future().wait();
  pollfd arrival{listening->fd.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&arrival, 1, 0), 0);
  EXPECT_EQ(asked->answers(), 0);
}

TEST(Probe, ARouteThatIsNotThereIsAwaitedUpToTheDeadline) {
  EventLoop asking("asking");
  const auto began = Clock::now();
  EXPECT_EQ(ask(asking, nowhere(), selfIncarnation(), milliseconds(200)), Liveness::kUnreachable);
  EXPECT_GE(Clock::now() - began, milliseconds(200));
}

TEST(Dial, WhatThisProcessLacksSaysNothingOfThePeer) {
  for (const int error : {EAGAIN, ENOBUFS, ENOMEM})
    EXPECT_EQ(Dial::endOfError(error), Dial::End::kNoSocket) << error;
  EXPECT_EQ(Dial::endOfError(ECONNREFUSED), Dial::End::kRefused);
  EXPECT_EQ(Dial::endOfError(EHOSTUNREACH), Dial::End::kUnreachable);
}

// This process has no descriptor left: its trouble, not the other's death.
TEST(Probe, NoDescriptorForTheQuestionMeansUnknown) {
  Acceptor acceptor;
  rlimit usual{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &usual), 0);
  const rlimit none{0, usual.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const Liveness answer =
      ask(acceptor.loop, acceptor.address(), selfIncarnation(), milliseconds(100));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &usual), 0);
  EXPECT_EQ(answer, Liveness::kUnknown);
}

}  // namespace
}  // namespace torchft_ext
