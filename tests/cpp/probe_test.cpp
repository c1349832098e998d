// The question whether a process lives, and whose words count as an answer.
#include "net/probe.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <future>
#include <thread>

#include "net_support.h"

namespace torchft_ext {
namespace {

using namespace net_test;  // NOLINT(google-build-using-namespace)

// Asks and waits; the probe is destroyed on its loop, as it has to be.
Liveness ask(EventLoop& loop, const SocketAddress& address, const Incarnation& who,
             Duration limit = std::chrono::seconds(30)) {
  std::promise<Liveness> answer;
  std::unique_ptr<Probe> probe;
  onLoop(loop, [&] {
    probe = std::make_unique<Probe>(
        loop, address, who, Deadline::after(limit),
        [&](Liveness given, const std::string& /*detail*/) { answer.set_value(given); });
  });
  const Liveness given = answer.get_future().get();
  onLoop(loop, [&] { probe.reset(); });
  return given;
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
  std::promise<Liveness> answer;
  std::unique_ptr<Probe> probe;
  onLoop(asking, [&] {
    probe = std::make_unique<Probe>(
        asking, address, selfIncarnation(), Deadline::after(milliseconds(1000)),
        [&](Liveness given, const std::string& /*detail*/) { answer.set_value(given); });
    std::this_thread::sleep_for(milliseconds(1100));  // stopped
  });
  const Liveness given = answer.get_future().get();
  onLoop(asking, [&] { probe.reset(); });
  return given;
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
    std::promise<Liveness> answer;
    std::unique_ptr<Probe> probe;
    onLoop(asking, [&] {
      probe = std::make_unique<Probe>(
          asking, slow.address(), selfIncarnation(), Deadline::after(milliseconds(500)),
          [&](Liveness said, const std::string& /*detail*/) { answer.set_value(said); });
    });
    slow.awaitQuestion();
    onLoop(asking, [] { std::this_thread::sleep_for(milliseconds(1000)); });
    given = answer.get_future().get();
    onLoop(asking, [&] { probe.reset(); });
  }
  EXPECT_EQ(given, Liveness::kAlive);
}

// The same, and the connection was reset meanwhile: nobody listens any more.
TEST(Probe, AConnectionThatEndedWhileTheAskerWasStoppedIsAskedAboutAgain) {
  EventLoop asking("asking");
  std::string error;
  auto listening = listenOn(loopbackAddress(), {}, &error);
  ASSERT_TRUE(listening) << error;
  std::promise<Liveness> answer;
  std::unique_ptr<Probe> probe;
  onLoop(asking, [&] {
    probe = std::make_unique<Probe>(
        asking, listening->address, selfIncarnation(), Deadline::after(milliseconds(300)),
        [&](Liveness given, const std::string& /*detail*/) { answer.set_value(given); });
    listening->fd.reset();
    std::this_thread::sleep_for(milliseconds(400));  // stopped
  });
  EXPECT_EQ(answer.get_future().get(), Liveness::kGone);
  onLoop(asking, [&] { probe.reset(); });
}

// A broadcast address, to which the kernel has no route for connections: it says so at once.
TEST(Probe, ARouteThatIsNotThereIsAwaitedUpToTheDeadline) {
  EventLoop asking("asking");
  const SocketAddress nowhere = *SocketAddress::fromNumeric("127.255.255.255", 4000);
  const auto began = Clock::now();
  EXPECT_EQ(ask(asking, nowhere, selfIncarnation(), milliseconds(200)), Liveness::kUnreachable);
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
