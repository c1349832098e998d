// The peer monitor against a peer that the test plays: what it says on the wire, and what it makes
// of what it hears.
#include "liveness/peer_monitor.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/mutex.h"
#include "cpp/liveness/fake_peer.h"
#include "liveness/process_state.h"

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
    options.idle_connection_grace = milliseconds(1);
    std::string error;
    monitor = PeerMonitor::start(options, &error);
    ASSERT_NE(monitor, nullptr) << error;
  }
  std::unique_ptr<PeerMonitor::Watch> watch(const FakePeer& peer) {
    return monitor->watch(nonce, secret, kSelfRank, {peer.record()}, verdict.sink());
  }
  RawConnection standingConnection(const FakePeer& peer) {
    RawConnection connection = peer.connect(monitor->livenessAddresses()[0], nonce, secret);
    EXPECT_EQ(connection.read().header.type, FrameType::kWelcome);
    connection.beat();
    EXPECT_EQ(connection.read().header.type, FrameType::kBeat);
    return connection;
  }
  // Until there is a verdict: a first one may have been sent before the connection stood, whose
  // answer does not say why the connection ended.
  void answerProbes(const FakePeer& peer, RefusalCode code) {
    EXPECT_TRUE(waitFor([&] {
      if (peer.isAsked()) peer.answerProbe(code);
      return verdict.count() > 0;
    }));
  }
  bool connectionsBecome(int count) {
    return waitFor([&] { return monitor->stats().connections == count; });
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
  RawConnection connection = peer.connect(monitor->livenessAddresses()[0], nonce, wrong);
  const RawConnection::Frame answer = connection.read();
  ASSERT_EQ(answer.header.type, FrameType::kRefused);
  EXPECT_EQ(decodeRefusal(answer.payload)->code, RefusalCode::kWrongSecret);
  EXPECT_EQ(monitor->stats().connections, 0);
}

TEST_F(PeerMonitorTest, GivesUpAnAcceptorThatDoesNotKnowTheSecret) {
  start(kNoFreeze);
  const FakePeer peer(Role::kAccepts);
  const auto watching = watch(peer);
  Hello hello;
  RawConnection connection = peer.accept(&hello);
  EXPECT_EQ(hello.proof, secret.connector);
  connection.write(peer.welcome(GenerationSecret::random()));
  EXPECT_TRUE(connection.isEnded());
  EXPECT_EQ(monitor->stats().connections, 0);
}

TEST_F(PeerMonitorTest, ClosedPortAtTheStartIsADeath) {
  start(kNoFreeze);
  FakePeer peer(Role::kAccepts);
  peer.closePort();
  const auto watching = watch(peer);
  expectPeerLost("its process ended");
  EXPECT_EQ(monitor->stats().deaths, 1U);
}

TEST_F(PeerMonitorTest, AcceptingEndNoticesADeathBeforeAnyConnectionStood) {
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
  RawConnection connection = standingConnection(peer);
  peer.closePort();
  connection.close();
  expectPeerLost("its process ended");
}

TEST_F(PeerMonitorTest, PortTakenOverByAnotherProcessIsADeath) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  standingConnection(peer).close();
  answerProbes(peer, RefusalCode::kWrongProcess);
  expectPeerLost("its process ended");
}

TEST_F(PeerMonitorTest, EndOfFileFromALivingProcessIsALostConnection) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  standingConnection(peer).close();
  answerProbes(peer, RefusalCode::kDuplicate);
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().kind, FailureKind::kConnectionLost);
  EXPECT_EQ(verdict.failure().cause.rank, kSelfRank);
  EXPECT_EQ(verdict.failure().cause.other_rank, FakePeer::kRank);
  EXPECT_EQ(monitor->stats().lost_connections, 1U);
}

TEST_F(PeerMonitorTest, CutConnectionIsALostConnection) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection connection = standingConnection(peer);
  monitor->cutConnectionForTest(peer.record().incarnation);
  answerProbes(peer, RefusalCode::kDuplicate);
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().kind, FailureKind::kConnectionLost);
}

TEST_F(PeerMonitorTest, MalformedFrameEndsTheConnection) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection connection = standingConnection(peer);
  connection.write(std::string(64, 'x'));
  EXPECT_TRUE(connection.isEnded());
  EXPECT_TRUE(connectionsBecome(0));
}

TEST_F(PeerMonitorTest, OverlongFrameEndsTheConnectionUnread) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection connection = standingConnection(peer);
  FrameHeader header;
  header.type = FrameType::kFailed;
  header.length = uint64_t{1} << 60U;
  const FrameBytes bytes = encodeHeader(header);
  connection.write(std::string(bytes.begin(), bytes.end()));
  EXPECT_TRUE(connection.isEnded());
}

TEST_F(PeerMonitorTest, SilentPeerIsFrozenAndIsToldSo) {
  start(milliseconds(100));
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection connection = standingConnection(peer);
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().kind, FailureKind::kPeerLost);
  EXPECT_EQ(verdict.failure().cause.how.rfind("its process has not answered for ", 0), 0U);
  EXPECT_EQ(connection.readNotice().failure.cause.rank, FakePeer::kRank);
  EXPECT_EQ(connection.readUpdates().header.type, FrameType::kFailed);
  EXPECT_TRUE(connection.isEnded());
  EXPECT_EQ(monitor->stats().freezes, 1U);
}

// Both say nothing; of one the other says that it has answered.
TEST_F(PeerMonitorTest, SilentPeerThatAnotherReachesIsALostConnection) {
  start(std::chrono::seconds(3));
  const FakePeer silent(Role::kConnects);
  const FakePeer other(Role::kConnects, 1);
  const auto watching =
      monitor->watch(nonce, secret, kSelfRank, {silent.record(), other.record()}, verdict.sink());
  RawConnection connection_to_other = standingConnection(other);  // first: it is to be asked
  RawConnection connection = standingConnection(silent);
  Notice question = connection_to_other.readNotice();
  while (question.type == Notice::Type::kSeek && question.sought != silent.incarnation())
    question = connection_to_other.readNotice();
  ASSERT_EQ(question.type, Notice::Type::kSeek);
  question.type = Notice::Type::kSeen;
  connection_to_other.write(question);
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().kind, FailureKind::kConnectionLost) << verdict.failure().describe();
  EXPECT_EQ(verdict.failure().cause.other_rank, FakePeer::kRank);
}

TEST_F(PeerMonitorTest, QuestionForAnotherIsPutToItAndItsAnswerPassedOn) {
  start(kNoFreeze);
  const FakePeer asker(Role::kConnects);
  const FakePeer sought(Role::kConnects, 1);
  const auto watching =
      monitor->watch(nonce, secret, kSelfRank, {asker.record(), sought.record()}, verdict.sink());
  RawConnection connection = standingConnection(asker);
  RawConnection connection_to_sought = standingConnection(sought);
  Notice question;
  question.type = Notice::Type::kSeek;
  question.generation = Nonce::random();
  question.sought = sought.incarnation();
  connection.write(question);
  Notice passed_on = connection_to_sought.readNotice();
  EXPECT_EQ(passed_on.type, Notice::Type::kSeek);
  EXPECT_EQ(passed_on.sought, sought.incarnation());
  passed_on.type = Notice::Type::kSeen;
  connection_to_sought.write(passed_on);
  const Notice answer = connection.readNotice();
  EXPECT_EQ(answer.type, Notice::Type::kSeen);
  EXPECT_EQ(answer.generation, question.generation);
  // And of this process itself.
  question.sought = selfIncarnation();
  connection.write(question);
  EXPECT_EQ(connection.readNotice().type, Notice::Type::kSeen);
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
  RawConnection connection = standingConnection(peer);
  connection.beat(milliseconds(200));
  for (int i = 0; i < 5; ++i) {
    const RawConnection::Frame frame = connection.read();
    ASSERT_EQ(frame.header.type, FrameType::kBeat);
    EXPECT_EQ(frame.header.tag, 0U) << "it asks for none itself";
  }
  expectNoFailure();
}

TEST_F(PeerMonitorTest, GoodbyeIsNoDeath) {
  start(kNoFreeze);
  FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection connection = standingConnection(peer);
  connection.write(FrameType::kGoodbye, 0, 1);
  connection.close();
  peer.closePort();
  EXPECT_TRUE(connectionsBecome(0));
  expectNoFailure();
}

TEST_F(PeerMonitorTest, EndOfAPeerThatLeftTheGenerationIsNoDeath) {
  start(kNoFreeze);
  FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection connection = standingConnection(peer);
  watching->peerLeft(FakePeer::kRank);
  peer.closePort();
  connection.close();
  EXPECT_TRUE(connectionsBecome(0));
  expectNoFailure();
}

TEST_F(PeerMonitorTest, AccusedProcessNamesItself) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection connection = standingConnection(peer);
  connection.write(FrameType::kFailed, 0, 0, "declared dead");
  connection.close();
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().kind, FailureKind::kPeerLost);
  EXPECT_EQ(verdict.failure().cause.rank, kSelfRank);
  EXPECT_EQ(verdict.failure().cause.pid, ::getpid());
}

TEST_F(PeerMonitorTest, ConnectionThatWasNeverConfirmedIsNoConnection) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection dropped = peer.connect(monitor->livenessAddresses()[0], nonce, secret);
  EXPECT_EQ(dropped.read().header.type, FrameType::kWelcome);
  EXPECT_EQ(monitor->stats().connections, 0);
  dropped.close();
  const RawConnection connection = standingConnection(peer);
  EXPECT_EQ(monitor->stats().connections, 1);
  expectNoFailure();
}

TEST_F(PeerMonitorTest, NewestConnectionOfAPeerIsItsOnlyOne) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection first = standingConnection(peer);
  const RawConnection second = standingConnection(peer);
  EXPECT_TRUE(first.isEnded());
  EXPECT_EQ(monitor->stats().connections, 1);
  expectNoFailure();
}

TEST_F(PeerMonitorTest, ConnectingEndTriesAgainAfterARefusal) {
  start(kNoFreeze);
  const FakePeer peer(Role::kAccepts);
  const auto watching = watch(peer);
  Hello hello;
  RawConnection refused = peer.accept(&hello);
  EXPECT_EQ(hello.nonce, nonce);
  refused.write(peer.welcome(secret) + encodeRefusal({RefusalCode::kDuplicate, "test"}));
  refused.close();
  RawConnection connection = peer.accept(&hello);
  while (hello.nonce.isZero()) connection = peer.accept(&hello);  // a probe
  connection.write(peer.welcome(secret));
  EXPECT_EQ(connection.read().header.type, FrameType::kBeat);
  connection.beat();
  EXPECT_TRUE(connectionsBecome(1));
  expectNoFailure();
}

TEST_F(PeerMonitorTest, ConnectionThatNoWatchNeedsIsClosedWithAGoodbye) {
  start(kNoFreeze);
  const FakePeer peer(Role::kAccepts);
  auto watching = watch(peer);
  Hello hello;
  RawConnection connection = peer.accept(&hello);
  connection.write(peer.welcome(secret));
  connection.beat();
  ASSERT_TRUE(connectionsBecome(1));
  watching.reset();
  const Notice leaving = connection.readNotice();
  EXPECT_EQ(leaving.type, Notice::Type::kLeft);
  EXPECT_EQ(leaving.rank, kSelfRank);
  const RawConnection::Frame last = connection.readUpdates();
  EXPECT_EQ(last.header.type, FrameType::kGoodbye);
  EXPECT_EQ(last.header.aux, 0U);
  EXPECT_TRUE(connectionsBecome(0));
  EXPECT_EQ(monitor->stats().watches, 0);
}

TEST_F(PeerMonitorTest, ConnectionThatIsNoLongerNeededIsReadUntilThePeerClosesItToo) {
  start(kNoFreeze);
  const FakePeer peer(Role::kAccepts);
  auto watching = watch(peer);
  Hello hello;
  RawConnection connection = peer.accept(&hello);
  connection.write(peer.welcome(secret));
  connection.beat();
  ASSERT_TRUE(connectionsBecome(1));
  watching.reset();
  connection.readNotice();
  ASSERT_EQ(connection.readUpdates().header.type, FrameType::kGoodbye);
  Notice crossing = abortOf(Nonce::random());
  connection.write(crossing);
  connection.close();
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
  RawConnection connection = standingConnection(peer);
  connection.write(abortOf(nonce));
  ASSERT_TRUE(verdict.arrives());
  EXPECT_EQ(verdict.failure().kind, FailureKind::kAborted);
  EXPECT_EQ(verdict.failure().cause.rank, FakePeer::kRank);
  EXPECT_EQ(verdict.failure().cause.how, "abort() was called");
}

TEST_F(PeerMonitorTest, NoticeOfAnotherGenerationOrOfARankOutsideHarmsNobody) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection connection = standingConnection(peer);
  connection.write(abortOf(Nonce::random()));
  Notice outside = abortOf(nonce);
  outside.failure.cause.rank = FakePeer::kRank + 1;
  connection.write(outside);
  EXPECT_TRUE(waitFor([this] { return monitor->stats().notices_heard == 2; }));
  expectNoFailure();
}

TEST_F(PeerMonitorTest, MalformedNoticeEndsTheConnection) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection connection = standingConnection(peer);
  connection.write(FrameType::kNotice, 0, 0, encodeNotice(abortOf(nonce)).substr(0, 20));
  EXPECT_TRUE(connection.isEnded());
}

TEST_F(PeerMonitorTest, AnnouncedFailureIsToldToPeersAndNotToItsOwner) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection connection = standingConnection(peer);
  watching->announce(abortOf(nonce).failure);
  const Notice told = connection.readNotice();
  EXPECT_EQ(told.type, Notice::Type::kFailed);
  EXPECT_EQ(told.generation, nonce);
  EXPECT_EQ(told.failure.kind, FailureKind::kAborted);
  expectNoFailure();
}

TEST_F(PeerMonitorTest, ConnectionThatComesUpAfterTheFailureStillBringsTheUpdates) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  auto watching = watch(peer);
  watching->announce(abortOf(nonce).failure);
  watching.reset();
  RawConnection connection = standingConnection(peer);
  EXPECT_EQ(connection.readNotice().failure.kind, FailureKind::kAborted);
}

TEST_F(PeerMonitorTest, StopSaysThatTheProcessLeaves) {
  start(kNoFreeze);
  const FakePeer peer(Role::kConnects);
  const auto watching = watch(peer);
  RawConnection connection = standingConnection(peer);
  EXPECT_TRUE(monitor->stop(testDeadline()));
  const RawConnection::Frame last = connection.readUpdates();
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
  const MonitoredPeer self{kSelfRank, selfIncarnation(), "here", 1, monitor->livenessAddresses()};
  const MonitoredPeer bare{0, Incarnation::random(), "there", 1, {}};
  const auto watching = monitor->watch(nonce, secret, kSelfRank, {self, bare}, verdict.sink());
  EXPECT_TRUE(waitFor([this] { return monitor->stats().watches == 1; }));
  EXPECT_EQ(monitor->stats().connections, 0);
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
