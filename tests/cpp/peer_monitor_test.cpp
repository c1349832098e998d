// The peer monitor against a peer that the test plays: what it says on the wire, and what it makes
// of what it hears.
#include "peers/peer_monitor.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/mutex.h"
#include "fake_peer.h"
#include "peers/process_state.h"

namespace torchft_ext {
namespace {

constexpr int kSelfRank = 2;
constexpr std::chrono::seconds kNoFreeze{3600};

// What a watch was told. Shared with the monitor's thread.
class Verdict {
 public:
  PeerMonitor::OnFailure sink() {
    return [shared = shared_](Failure failure) {
      MutexLock lock(shared->mutex);
      shared->failures.push_back(std::move(failure));
    };
  }
  bool arrives() {
    return waitFor([this] { return count() > 0; });
  }
  size_t count() {
    MutexLock lock(shared_->mutex);
    return shared_->failures.size();
  }
  Failure failure() {
    MutexLock lock(shared_->mutex);
    return shared_->failures.at(0);
  }

 private:
  struct Shared {
    Mutex mutex;
    std::vector<Failure> failures GUARDED_BY(mutex);
  };
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

class PeerMonitorTest : public ::testing::Test {
 protected:
  void start(Duration heartbeat_limit) {
    MonitorOptions options;
    options.bind_address = *SocketAddress::fromNumeric("127.0.0.1", 0);
    options.heartbeat_limit = heartbeat_limit;
    options.host = "here";
    options.idle_line_grace = milliseconds(1);
    std::string error;
    monitor = PeerMonitor::start(options, &error);
    ASSERT_NE(monitor, nullptr) << error;
  }
  std::unique_ptr<PeerMonitor::Watch> watch(const FakePeer& peer) {
    return monitor->watch(nonce, secret, kSelfRank, {peer.record()}, verdict.sink());
  }
  RawLine standingLine(const FakePeer& peer) {
    RawLine line = peer.connect(monitor->lineAddresses()[0], nonce, secret);
    EXPECT_EQ(line.read().header.type, FrameType::kWelcome);
    line.beat();
    EXPECT_EQ(line.read().header.type, FrameType::kBeat);
    return line;
  }
  // Until there is a verdict: a first one may have been sent before the line stood, whose answer
  // does not say why the line ended.
  void answerProbes(const FakePeer& peer, RefusalCode code) {
    EXPECT_TRUE(waitFor([&] {
      if (peer.isAsked()) peer.answerProbe(code);
      return verdict.count() > 0;
    }));
  }
  bool linesBecome(int count) {
    return waitFor([&] { return monitor->stats().lines == count; });
  }
  // Nothing that has happened up to now was held for a failure.
  void expectNoFailure() {
    EXPECT_TRUE(monitor->stop(testDeadline()));
    EXPECT_EQ(verdict.count(), 0U) << verdict.failure().describe();
  }
  void expectPeerLost(const std::string& how) {
    ASSERT_TRUE(verdict.arrives());
    const Failure failure = verdict.failure();
    EXPECT_EQ(failure.kind, FailureKind::kPeerLost);
    EXPECT_EQ(failure.cause.rank, FakePeer::kRank);
    EXPECT_EQ(failure.cause.pid, 4711);
    EXPECT_EQ(failure.cause.how, how);
  }

  const Nonce nonce = Nonce::random();
  const GenerationSecret secret = GenerationSecret::random();
  Verdict verdict;
  std::shared_ptr<PeerMonitor> monitor;
};

using Role = FakePeer::Role;

Notice abortOf(const Nonce& generation) {
  Notice notice;
  notice.type = Notice::Type::kFailed;
  notice.generation = generation;
  notice.failure.kind = FailureKind::kAborted;
  notice.failure.cause.rank = FakePeer::kRank;
  notice.failure.cause.how = "abort() was called";
  return notice;
}

TEST_F(PeerMonitorTest, RefusesAWrongSecret) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  GenerationSecret wrong = GenerationSecret::random();
  wrong.acceptor = secret.acceptor;
  RawLine line = peer.connect(monitor->lineAddresses()[0], nonce, wrong);
  const RawLine::Frame answer = line.read();
  ASSERT_EQ(answer.header.type, FrameType::kRefused);
  EXPECT_EQ(decodeRefusal(answer.payload)->code, RefusalCode::kWrongSecret);
  EXPECT_EQ(monitor->stats().lines, 0);
}

TEST_F(PeerMonitorTest, GivesUpAnAcceptorThatDoesNotKnowTheSecret) {
  start(kNoFreeze);
  const FakePeer peer(Role::kAccepts);
  const auto watching = watch(peer);
  Hello hello;
  RawLine line = peer.accept(&hello);
  EXPECT_EQ(hello.proof, secret.connector);
  line.write(peer.welcome(GenerationSecret::random()));
  EXPECT_TRUE(line.isEnded());
  EXPECT_EQ(monitor->stats().lines, 0);
}

TEST_F(PeerMonitorTest, ClosedPortAtTheStartIsADeath) {
  start(kNoFreeze);
  FakePeer peer(Role::kAccepts);
  peer.closePort();
  const auto watching = watch(peer);
  expectPeerLost("its process ended");
  EXPECT_EQ(monitor->stats().deaths, 1U);
}

TEST_F(PeerMonitorTest, AcceptingEndNoticesADeathBeforeAnyLineStood) {
  start(kNoFreeze);
  FakePeer peer(Role::kConnects);
  peer.closePort();
  const auto watching = watch(peer);
  expectPeerLost("its process ended");
}

TEST_F(PeerMonitorTest, EndOfFileAndClosedPortAreADeath) {
  start(kNoFreeze);
  FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  peer.closePort();
  line.close();
  expectPeerLost("its process ended");
}

TEST_F(PeerMonitorTest, PortTakenOverByAnotherProcessIsADeath) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  standingLine(peer).close();
  answerProbes(peer, RefusalCode::kWrongProcess);
  expectPeerLost("its process ended");
}

TEST_F(PeerMonitorTest, EndOfFileFromALivingProcessIsALostLink) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  standingLine(peer).close();
  answerProbes(peer, RefusalCode::kDuplicate);
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().kind, FailureKind::kLinkLost);
  EXPECT_EQ(verdict.failure().cause.rank, kSelfRank);
  EXPECT_EQ(verdict.failure().cause.other_rank, FakePeer::kRank);
  EXPECT_EQ(monitor->stats().lost_links, 1U);
}

TEST_F(PeerMonitorTest, CutLineIsALostLink) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  monitor->cutLineForTest(peer.record().incarnation);
  answerProbes(peer, RefusalCode::kDuplicate);
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().kind, FailureKind::kLinkLost);
}

TEST_F(PeerMonitorTest, MalformedFrameEndsTheLine) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  line.write(std::string(64, 'x'));
  EXPECT_TRUE(line.isEnded());
  EXPECT_TRUE(linesBecome(0));
}

TEST_F(PeerMonitorTest, OverlongFrameEndsTheLineUnread) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  FrameHeader header;
  header.type = FrameType::kFailed;
  header.length = uint64_t{1} << 60U;
  const FrameBytes bytes = encodeHeader(header);
  line.write(std::string(bytes.begin(), bytes.end()));
  EXPECT_TRUE(line.isEnded());
}

TEST_F(PeerMonitorTest, SilentPeerIsFrozenAndIsToldSo) {
  start(milliseconds(100));
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().kind, FailureKind::kPeerLost);
  EXPECT_EQ(verdict.failure().cause.how.rfind("its process has not answered for ", 0), 0U);
  EXPECT_EQ(line.readNotice().failure.cause.rank, FakePeer::kRank);
  EXPECT_EQ(line.readNews().header.type, FrameType::kFailed);
  EXPECT_TRUE(line.isEnded());
  EXPECT_EQ(monitor->stats().freezes, 1U);
}

// Both say nothing; of one the other says that it has answered.
TEST_F(PeerMonitorTest, SilentPeerThatAnotherReachesIsALostLink) {
  start(std::chrono::seconds(3));
  const FakePeer silent(Role::kConnects);
  const FakePeer other(Role::kConnects, 1);
  const auto watching =
      monitor->watch(nonce, secret, kSelfRank, {silent.record(), other.record()}, verdict.sink());
  RawLine line_to_other = standingLine(other);  // first: it is to be asked
  RawLine line = standingLine(silent);
  Notice question = line_to_other.readNotice();
  while (question.type == Notice::Type::kSeek && question.sought != silent.incarnation())
    question = line_to_other.readNotice();
  ASSERT_EQ(question.type, Notice::Type::kSeek);
  question.type = Notice::Type::kSeen;
  line_to_other.write(question);
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().kind, FailureKind::kLinkLost) << verdict.failure().describe();
  EXPECT_EQ(verdict.failure().cause.other_rank, FakePeer::kRank);
}

TEST_F(PeerMonitorTest, QuestionForAnotherIsPutToItAndItsAnswerPassedOn) {
  start(kNoFreeze);
  const FakePeer asker(Role::kConnects);
  const FakePeer sought(Role::kConnects, 1);
  const auto watching =
      monitor->watch(nonce, secret, kSelfRank, {asker.record(), sought.record()}, verdict.sink());
  RawLine line = standingLine(asker);
  RawLine line_to_sought = standingLine(sought);
  Notice question;
  question.type = Notice::Type::kSeek;
  question.generation = Nonce::random();
  question.sought = sought.incarnation();
  line.write(question);
  Notice passed_on = line_to_sought.readNotice();
  EXPECT_EQ(passed_on.type, Notice::Type::kSeek);
  EXPECT_EQ(passed_on.sought, sought.incarnation());
  passed_on.type = Notice::Type::kSeen;
  line_to_sought.write(passed_on);
  const Notice answer = line.readNotice();
  EXPECT_EQ(answer.type, Notice::Type::kSeen);
  EXPECT_EQ(answer.generation, question.generation);
  // And of this process itself.
  question.sought = selfIncarnation();
  line.write(question);
  EXPECT_EQ(line.readNotice().type, Notice::Type::kSeen);
  expectNoFailure();
}

TEST_F(PeerMonitorTest, PortThatConnectsButNeverAnswersIsFrozen) {
  start(milliseconds(100));
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);  // the kernel takes connections, nobody reads
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().cause.how.rfind("its process has not answered for ", 0), 0U);
}

TEST_F(PeerMonitorTest, BeatsAsOftenAsThePeerAsks) {
  start(Duration::zero());
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  line.beat(milliseconds(200));
  for (int i = 0; i < 5; ++i) {
    const RawLine::Frame frame = line.read();
    ASSERT_EQ(frame.header.type, FrameType::kBeat);
    EXPECT_EQ(frame.header.tag, 0U) << "it asks for none itself";
  }
  expectNoFailure();
}

TEST_F(PeerMonitorTest, GoodbyeIsNoDeath) {
  start(kNoFreeze);
  FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  line.write(FrameType::kGoodbye, 0, 1);
  line.close();
  peer.closePort();
  EXPECT_TRUE(linesBecome(0));
  expectNoFailure();
}

TEST_F(PeerMonitorTest, EndOfAPeerThatLeftTheGenerationIsNoDeath) {
  start(kNoFreeze);
  FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  watching->peerLeft(FakePeer::kRank);
  peer.closePort();
  line.close();
  EXPECT_TRUE(linesBecome(0));
  expectNoFailure();
}

TEST_F(PeerMonitorTest, AccusedProcessNamesItself) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  line.write(FrameType::kFailed, 0, 0, "declared dead");
  line.close();
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().kind, FailureKind::kPeerLost);
  EXPECT_EQ(verdict.failure().cause.rank, kSelfRank);
  EXPECT_EQ(verdict.failure().cause.pid, ::getpid());
}

TEST_F(PeerMonitorTest, ConnectionThatWasNeverConfirmedIsNoLine) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine dropped = peer.connect(monitor->lineAddresses()[0], nonce, secret);
  EXPECT_EQ(dropped.read().header.type, FrameType::kWelcome);
  EXPECT_EQ(monitor->stats().lines, 0);
  dropped.close();
  const RawLine line = standingLine(peer);
  EXPECT_EQ(monitor->stats().lines, 1);
  expectNoFailure();
}

TEST_F(PeerMonitorTest, NewestLineOfAPeerIsItsOnlyOne) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine first = standingLine(peer);
  const RawLine second = standingLine(peer);
  EXPECT_TRUE(first.isEnded());
  EXPECT_EQ(monitor->stats().lines, 1);
  expectNoFailure();
}

TEST_F(PeerMonitorTest, ConnectingEndTriesAgainAfterARefusal) {
  start(kNoFreeze);
  const FakePeer peer(Role::kAccepts);
  const auto watching = watch(peer);
  Hello hello;
  RawLine refused = peer.accept(&hello);
  EXPECT_EQ(hello.nonce, nonce);
  refused.write(peer.welcome(secret) + encodeRefusal({RefusalCode::kDuplicate, "test"}));
  refused.close();
  RawLine line = peer.accept(&hello);
  while (hello.nonce.isZero()) line = peer.accept(&hello);  // a probe
  line.write(peer.welcome(secret));
  EXPECT_EQ(line.read().header.type, FrameType::kBeat);
  line.beat();
  EXPECT_TRUE(linesBecome(1));
  expectNoFailure();
}

TEST_F(PeerMonitorTest, LineThatNoWatchNeedsIsClosedWithAGoodbye) {
  start(kNoFreeze);
  const FakePeer peer(Role::kAccepts);
  auto watching = watch(peer);
  Hello hello;
  RawLine line = peer.accept(&hello);
  line.write(peer.welcome(secret));
  line.beat();
  ASSERT_TRUE(linesBecome(1));
  watching.reset();
  const Notice leaving = line.readNotice();
  EXPECT_EQ(leaving.type, Notice::Type::kLeft);
  EXPECT_EQ(leaving.rank, kSelfRank);
  const RawLine::Frame last = line.readNews();
  EXPECT_EQ(last.header.type, FrameType::kGoodbye);
  EXPECT_EQ(last.header.aux, 0U);
  EXPECT_TRUE(linesBecome(0));
  EXPECT_EQ(monitor->stats().watches, 0);
}

TEST_F(PeerMonitorTest, LineThatIsNoLongerNeededIsReadUntilThePeerClosesItToo) {
  start(kNoFreeze);
  const FakePeer peer(Role::kAccepts);
  auto watching = watch(peer);
  Hello hello;
  RawLine line = peer.accept(&hello);
  line.write(peer.welcome(secret));
  line.beat();
  ASSERT_TRUE(linesBecome(1));
  watching.reset();
  line.readNotice();
  ASSERT_EQ(line.readNews().header.type, FrameType::kGoodbye);
  Notice crossing = abortOf(Nonce::random());
  line.write(crossing);
  line.close();
  ASSERT_TRUE(waitFor([this] { return monitor->stats().notices_heard == 1; }));
  const auto next =
      monitor->watch(crossing.generation, secret, kSelfRank, {peer.record()}, verdict.sink());
  ASSERT_TRUE(verdict.arrives()) << "it was told ahead of the generation";
  EXPECT_EQ(verdict.failure().kind, FailureKind::kAborted);
}

TEST_F(PeerMonitorTest, NoticeFailsTheGenerationWithWhatItSays) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  line.write(abortOf(nonce));
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().kind, FailureKind::kAborted);
  EXPECT_EQ(verdict.failure().cause.rank, FakePeer::kRank);
  EXPECT_EQ(verdict.failure().cause.how, "abort() was called");
}

TEST_F(PeerMonitorTest, NoticeOfAnotherGenerationOrOfARankOutsideHarmsNobody) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  line.write(abortOf(Nonce::random()));
  Notice outside = abortOf(nonce);
  outside.failure.cause.rank = FakePeer::kRank + 1;
  line.write(outside);
  EXPECT_TRUE(waitFor([this] { return monitor->stats().notices_heard == 2; }));
  expectNoFailure();
}

TEST_F(PeerMonitorTest, MalformedNoticeEndsTheLine) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  line.write(FrameType::kNotice, 0, 0, encodeNotice(abortOf(nonce)).substr(0, 20));
  EXPECT_TRUE(line.isEnded());
}

TEST_F(PeerMonitorTest, AnnouncedFailureIsToldToPeersAndNotToItsOwner) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  watching->announce(abortOf(nonce).failure);
  const Notice told = line.readNotice();
  EXPECT_EQ(told.type, Notice::Type::kFailed);
  EXPECT_EQ(told.generation, nonce);
  EXPECT_EQ(told.failure.kind, FailureKind::kAborted);
  expectNoFailure();
}

TEST_F(PeerMonitorTest, LineThatComesUpAfterTheFailureStillBringsTheNews) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  auto watching = watch(peer);
  watching->announce(abortOf(nonce).failure);
  watching.reset();
  RawLine line = standingLine(peer);
  EXPECT_EQ(line.readNotice().failure.kind, FailureKind::kAborted);
}

TEST_F(PeerMonitorTest, StopSaysThatTheProcessLeaves) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawLine line = standingLine(peer);
  EXPECT_TRUE(monitor->stop(testDeadline()));
  const RawLine::Frame last = line.readNews();
  EXPECT_EQ(last.header.type, FrameType::kGoodbye);
  EXPECT_EQ(last.header.aux, 1U);
  EXPECT_TRUE(monitor->stop(testDeadline())) << "stopping twice";
}

TEST_F(PeerMonitorTest, WatchesMayOutliveTheMonitor) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  auto watching = watch(peer);
  monitor.reset();
  watching->peerLeft(FakePeer::kRank);
  watching.reset();
  EXPECT_EQ(verdict.count(), 0U);
}

TEST_F(PeerMonitorTest, WatchAfterStopLetsGoOfWhatItWasGiven) {
  start(kNoFreeze);
  ASSERT_TRUE(monitor->stop(testDeadline()));
  const FakePeer peer(Role::kConnects);
  const auto held = std::make_shared<int>();
  const auto watching =
      monitor->watch(nonce, secret, kSelfRank, {peer.record()}, [held](const Failure&) {});
  watching->announce({});
  EXPECT_EQ(held.use_count(), 1);
  EXPECT_EQ(monitor->stats().watches, 0);
}

TEST_F(PeerMonitorTest, PeersWithoutAddressesAndThisProcessItselfAreNotWatched) {
  start(kNoFreeze);
  const MonitoredPeer self{kSelfRank, selfIncarnation(), "here", 1, monitor->lineAddresses()};
  const MonitoredPeer bare{0, Incarnation::random(), "there", 1, {}};
  const auto watching = monitor->watch(nonce, secret, kSelfRank, {self, bare}, verdict.sink());
  EXPECT_TRUE(waitFor([this] { return monitor->stats().watches == 1; }));
  EXPECT_EQ(monitor->stats().lines, 0);
  expectNoFailure();
}

TEST_F(PeerMonitorTest, AddressThatIsNotOurOwnIsAnError) {
  MonitorOptions options;
  options.bind_address = *SocketAddress::fromNumeric("192.0.2.1", 0);  // RFC 5737: nobody's
  std::string error;
  EXPECT_EQ(PeerMonitor::start(options, &error), nullptr);
  EXPECT_NE(error.find("192.0.2.1"), std::string::npos) << error;
}

TEST(ProcessState, SaysNothingOfAProcessThatRunsOrIsUnknown) {
  EXPECT_EQ(describeProcessState(::getpid()), "");
  EXPECT_EQ(describeProcessState(-1), "");
}

TEST(ProcessState, IsTheLetterBehindTheCommandsName) {
  const auto of = [](const std::string& letter) {
    return describeProcessState("CoreDumping:\t0\n", "12 (python3) " + letter + " 1 12 12 0");
  };
  EXPECT_EQ(of("T"), "state T: stopped by a signal");
  EXPECT_EQ(of("t"), "state t: stopped by a debugger");
  EXPECT_EQ(of("D"), "state D: in uninterruptible sleep");
  EXPECT_EQ(of("Z"), "state Z: its main thread has ended");
  for (const char* could_answer : {"R", "S", "I"}) EXPECT_EQ(of(could_answer), "");
}

TEST(ProcessState, ACommandsNameMayHoldAnything) {
  EXPECT_EQ(describeProcessState("", "12 (a) T (b) S 1"), "");
  EXPECT_EQ(describeProcessState("", "12 (a) S (b) T 1"), "state T: stopped by a signal");
  for (const char* cut : {"", "12 (python3", "12 (python3)", "12 (python3) "})
    EXPECT_EQ(describeProcessState("", cut), "");
}

TEST(ProcessState, ACoreThatIsBeingWrittenIsSaidWhateverTheLetter) {
  const std::string status = "Name:\tpython3\nCoreDumping:\t1\nTHP_enabled:\t1\n";
  EXPECT_EQ(describeProcessState(status, "12 (python3) D 1"), "it is dumping core");
}

}  // namespace
}  // namespace torchft_ext
