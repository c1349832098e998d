// Connections between members of a job: whom they hear, and to whom they talk.
#include "elastic/member_network.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cpp/support/net_support.h"

namespace torchft_ext {
namespace {

using namespace net_test;  // NOLINT(google-build-using-namespace)

std::string frameOf(FrameType type, const std::string& payload) {
  FrameHeader header;
  header.type = type;
  header.length = payload.size();
  const FrameBytes bytes = encodeHeader(header);
  return std::string(bytes.begin(), bytes.end()) + payload;
}

std::string payloadOf(RawPeer& peer) {
  const std::string bytes = peer.readBytes(kFrameHeaderBytes);
  FrameBytes header{};
  if (bytes.size() != header.size()) return {};
  std::copy(bytes.begin(), bytes.end(), header.begin());
  std::string why;
  const auto found = decodeHeader(header, &why);
  return found ? peer.readBytes(found->length) : std::string();
}

Member memberAt(const SocketAddress& address, const Incarnation& incarnation) {
  MemberRecord record;
  record.incarnation = incarnation;
  record.host = "here";
  record.addresses = {address};
  return {MemberId::random(), 1, encodeRecord(record)};
}

// A member with its own loop, and what it has heard.
class Node {
 public:
  explicit Node(const JobKey& key, Duration limit = std::chrono::seconds(5)) {
    onLoop(loop_, [&] {
      MemberNetwork::Events events;
      events.on_message = [this](const MemberId&, const FrameHeader&, const std::string& payload) {
        heard_.push_back(payload);
      };
      events.on_connected = [this](const MemberId&) { ++connected_anew_; };
      events.on_disconnected = [this](const MemberId& id) { disconnected_.push_back(id); };
      events.on_lost = [this](const MemberId&, Loss loss, const std::string& how) {
        if (loss == Loss::kUnreachable) lost_ = how;
      };
      events.on_goodbye = [](const MemberId&) {};
      network_ = std::make_unique<MemberNetwork>(loop_, limit, std::move(events));
      EXPECT_EQ(network_->open(loopbackAddress(), {}), "");
      address_ = network_->addresses().back();
      self_ = memberAt(address_, network_->incarnation());
      network_->setSelf(self_);
      network_->admitMembers(key);
    });
  }
  ~Node() {
    onLoop(loop_, [this] { network_.reset(); });
  }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  const Member& self() const { return self_; }
  const SocketAddress& address() const { return address_; }
  Incarnation incarnation() const { return network_->incarnation(); }
  void enter(const View& view) {
    onLoop(loop_, [&] { network_->enterView(view); });
  }
  void say(const Member& to, const std::string& words) {
    onLoop(loop_, [&] {
      network_->introduce(to);
      network_->send(to.id, FrameHeader{FrameType::kElastic}, words);
    });
  }
  std::vector<std::string> heard() {
    std::vector<std::string> found;
    onLoop(loop_, [&] { found = heard_; });
    return found;
  }
  std::string lost() {  // how a member is unreachable
    std::string found;
    onLoop(loop_, [&] { found = lost_; });
    return found;
  }
  std::vector<MemberId> disconnected() {
    std::vector<MemberId> found;
    onLoop(loop_, [&] { found = disconnected_; });
    return found;
  }
  void forgetAll() {
    onLoop(loop_, [this] { network_->keepOnly({}); });
  }
  int connectedAnew() {  // so often what was said may have been lost
    int found = 0;
    onLoop(loop_, [&] { found = connected_anew_; });
    return found;
  }

 private:
  EventLoop loop_{"ft-test"};
  std::unique_ptr<MemberNetwork> network_;
  Member self_;
  SocketAddress address_ = loopbackAddress();
  std::vector<std::string> heard_;
  std::string lost_;
  std::vector<MemberId> disconnected_;
  int connected_anew_ = 0;
};

// A connection to a node, played by hand: up to its question.
struct Visit {
  Visit(const Node& node, const JobKey& key) : peer(node.address()), acceptor(node.self().id) {
    Hello hello;
    hello.nonce = key.nonce;
    hello.from = Incarnation::random();
    hello.rank = 0;
    peer.say(encodeHello(hello));
    payloadOf(peer);  // the welcome
    question = decodeQuestion(payloadOf(peer)).value_or(ConnectionQuestion{});
  }

  std::string claimBy(const Member& member, const MemberKeys& keys) const {
    ConnectionClaim claim;
    claim.member = member;
    claim.challenge = Challenge::random();
    claim.view = keys.viewFor(question.newest);
    claim.proof = keys.prove(ConnectionEnd::kConnector, {question.challenge, claim.challenge,
                                                         acceptor, member.id, claim.view});
    return frameOf(FrameType::kMember, encodeClaim(claim));
  }
  // What a claim is answered with; empty: by the end of the connection.
  std::string answerTo(const std::string& claim) {
    peer.say(claim);
    std::string answer = peer.readBytes(1);
    if (!answer.empty()) peer.say(frameOf(FrameType::kElastic, "words"));
    return answer;
  }

  RawPeer peer;
  MemberId acceptor;
  ConnectionQuestion question;
};

// The next connection that comes to an acceptor, played by hand: up to the acceptor's proof.
RawPeer acceptAs(RawAcceptor& acceptor, const Member& member, const MemberKeys& keys,
                 const Node& node) {
  RawPeer peer = acceptor.accept();
  payloadOf(peer);  // the hello
  const ConnectionQuestion question{Challenge::random(), {}};
  const Incarnation incarnation = decodeRecord(member.record)->incarnation;
  peer.say(encodeWelcome({{}, incarnation}) +
           frameOf(FrameType::kMember, encodeQuestion(question)));
  const auto claim = decodeClaim(payloadOf(peer));
  EXPECT_TRUE(claim);
  const ConnectionProof proof =
      keys.prove(ConnectionEnd::kAcceptor,
                 {question.challenge, claim.value_or(ConnectionClaim{}).challenge, member.id,
                  node.self().id, claim.value_or(ConnectionClaim{}).view});
  peer.say(frameOf(FrameType::kMember, encodeProof(proof)));
  return peer;
}

class Members : public testing::Test {
 protected:
  MemberKeys keysOf(const Member& member, const std::vector<View>& views) const {
    MemberKeys keys;
    keys.setJob(key_.secret);
    for (const View& view : views) keys.enter(view, member.id);
    return keys;
  }
  View viewOf(uint64_t number, const std::vector<Member>& members) const {
    View view;
    view.lineage = lineage_;
    view.number = number;
    view.secret = ViewSecret::random();
    view.members = members;
    return view;
  }

  const JobKey key_{Nonce::random(), JobSecret::random()};
  const Lineage lineage_ = Lineage::random();
  const Member other_ = memberAt(loopbackAddress(), Incarnation::random());
};

TEST_F(Members, HearEachOther) {
  Node one(key_);
  Node two(key_);
  one.say(two.self(), "words");
  EXPECT_TRUE(waitFor([&] { return two.heard() == std::vector<std::string>{"words"}; }));
}

// What was on its way there may be lost, and whoever said it need not say it again.
TEST_F(Members, HearWhereOneDoesNotTalkToThemAnyMore) {
  Node one(key_);
  Node two(key_);
  one.say(two.self(), "words");
  EXPECT_TRUE(waitFor([&] { return two.heard().size() == 1; }));
  EXPECT_TRUE(two.disconnected().empty());
  one.forgetAll();
  EXPECT_TRUE(waitFor([&] { return two.disconnected() == std::vector{one.self().id}; }));
}

TEST_F(Members, DoNotHearWhoDoesNotKnowTheJobsSecret) {
  Node node(key_);
  MemberKeys strange;
  strange.setJob(JobSecret::random());
  Visit stranger(node, key_);
  EXPECT_EQ(stranger.answerTo(stranger.claimBy(other_, strange)), "");
  Visit newcomer(node, key_);
  EXPECT_NE(newcomer.answerTo(newcomer.claimBy(other_, keysOf(other_, {}))), "");
  EXPECT_TRUE(waitFor([&] { return !node.heard().empty(); }));
  EXPECT_EQ(node.heard().size(), 1U);
}

TEST_F(Members, DoNotHearWhoHasProvedNothing) {
  Node node(key_);
  Visit visit(node, key_);
  EXPECT_EQ(visit.answerTo(frameOf(FrameType::kElastic, "words")), "");
  EXPECT_TRUE(node.heard().empty());
}

TEST_F(Members, DoNotHearANewcomerUnderTheIdOfAMember) {
  Node node(key_);
  const View view = viewOf(2, {node.self(), other_});
  node.enter(view);
  Visit newcomer(node, key_);
  EXPECT_EQ(newcomer.answerTo(newcomer.claimBy(other_, keysOf(other_, {}))), "");
  Visit member(node, key_);
  EXPECT_NE(member.answerTo(member.claimBy(other_, keysOf(other_, {view}))), "");
}

TEST_F(Members, DoNotHearAnotherProcessUnderTheIdOfAMember) {
  Node node(key_);
  const View view = viewOf(2, {node.self(), other_});
  node.enter(view);
  Member process = memberAt(loopbackAddress(), Incarnation::random());
  process.id = other_.id;
  Visit visit(node, key_);
  EXPECT_EQ(visit.answerTo(visit.claimBy(process, keysOf(other_, {view}))), "");
}

// Who came under the id of a newcomer had to know no more than the newcomer did.
TEST_F(Members, DoNotHearOnAStandingConnectionWhoHasToProveMoreByNow) {
  Node node(key_);
  Member late = other_;
  late.since = 2;
  const View second = viewOf(2, {node.self(), late});
  node.enter(second);
  Visit impostor(node, key_);
  EXPECT_NE(impostor.answerTo(impostor.claimBy(late, keysOf(late, {}))), "");
  Visit member(node, key_);
  EXPECT_NE(member.answerTo(member.claimBy(late, keysOf(late, {second}))), "");
  EXPECT_TRUE(waitFor([&] { return node.heard().size() == 2; }));
  node.enter(viewOf(3, {node.self(), late}));
  impostor.peer.readToEnd();
  member.peer.say(frameOf(FrameType::kElastic, "more words"));
  EXPECT_TRUE(waitFor([&] { return node.heard().size() == 3; }));
  EXPECT_EQ(node.heard().back(), "more words");
}

TEST_F(Members, DoNotHearWhoWasLeftOutUnderTheIdOfANewcomer) {
  Node node(key_);
  const View second = viewOf(2, {node.self(), other_});
  node.enter(second);
  Member late = memberAt(loopbackAddress(), Incarnation::random());
  late.since = 3;
  const View third = viewOf(3, {node.self(), late});
  node.enter(third);
  Visit impostor(node, key_);  // by the view that it was in
  EXPECT_NE(impostor.answerTo(impostor.claimBy(late, keysOf(other_, {second}))), "");
  Visit newcomer(node, key_);
  EXPECT_NE(newcomer.answerTo(newcomer.claimBy(late, keysOf(late, {third}))), "");
  EXPECT_TRUE(waitFor([&] { return node.heard().size() == 2; }));
  node.enter(viewOf(4, {node.self(), late}));
  impostor.peer.readToEnd();
  newcomer.peer.say(frameOf(FrameType::kElastic, "more words"));
  EXPECT_TRUE(waitFor([&] { return node.heard().size() == 3; }));
}

TEST_F(Members, TalkAnewToWhoHasToProveMoreByNow) {
  Node node(key_);
  RawAcceptor acceptor;
  Member late = memberAt(acceptor.address(), Incarnation::random());
  late.since = 2;
  node.enter(viewOf(2, {node.self(), late}));
  node.say(late, "words");
  RawPeer peer = acceptAs(acceptor, late, keysOf(late, {}), node);
  EXPECT_EQ(payloadOf(peer), "words");
  node.enter(viewOf(3, {node.self(), late}));
  EXPECT_EQ(peer.readToEnd(), "");
  RawPeer again = acceptor.accept();
  EXPECT_NE(payloadOf(again), "");  // a hello
}

// Whoever came under the id of a newcomer first, from elsewhere, is not told what the newcomer is.
TEST_F(Members, TalkToAMemberWhereItIsKnownToBeByNow) {
  Node node(key_);
  RawAcceptor elsewhere;
  RawAcceptor acceptor;
  const Member before = memberAt(elsewhere.address(), Incarnation::random());
  node.say(before, "words");
  RawPeer peer = acceptAs(elsewhere, before, keysOf(before, {}), node);
  EXPECT_EQ(payloadOf(peer), "words");
  Member now = memberAt(acceptor.address(), Incarnation::random());
  now.id = before.id;
  node.say(now, "more words");
  EXPECT_EQ(peer.readToEnd(), "");
  RawPeer again = acceptAs(acceptor, now, keysOf(now, {}), node);
  EXPECT_EQ(payloadOf(again), "more words");
}

// It may hold a secret, and whoever answers at the new address need not be whom it was said to.
TEST_F(Members, SayNothingAtANewAddressThatWaitedForTheOldOne) {
  Node node(key_);
  RawAcceptor silent;  // nothing is proved there, so all that is said waits
  RawAcceptor acceptor;
  const Member before = memberAt(silent.address(), Incarnation::random());
  node.say(before, "words for the old address");
  Member now = memberAt(acceptor.address(), Incarnation::random());
  now.id = before.id;
  node.say(now, "words for the new one");
  RawPeer peer = acceptAs(acceptor, now, keysOf(now, {}), node);
  EXPECT_EQ(payloadOf(peer), "words for the new one");
  EXPECT_EQ(node.connectedAnew(), 1);  // so it is said again, if it still holds
}

TEST_F(Members, DoNotHearWhatWasSaidOnAnotherConnection) {
  Node node(key_);
  Visit first(node, key_);
  const std::string claim = first.claimBy(other_, keysOf(other_, {}));
  EXPECT_NE(first.answerTo(claim), "");
  Visit second(node, key_);
  EXPECT_EQ(second.answerTo(claim), "");
}

TEST_F(Members, SayNothingToWhoCannotProveThatItKnowsTheSecret) {
  Node node(key_);
  RawAcceptor acceptor;
  const Incarnation incarnation = Incarnation::random();
  node.say(memberAt(acceptor.address(), incarnation), "words");
  RawPeer peer = acceptor.accept();
  payloadOf(peer);  // the hello
  const ConnectionQuestion question{Challenge::random(), {}};
  peer.say(encodeWelcome({{}, incarnation}) +
           frameOf(FrameType::kMember, encodeQuestion(question)));
  const auto claim = decodeClaim(payloadOf(peer));
  ASSERT_TRUE(claim);
  EXPECT_EQ(claim->member, node.self());
  peer.say(frameOf(FrameType::kMember, encodeProof({})));
  EXPECT_EQ(peer.readToEnd(), "");
}

TEST_F(Members, ReportWhoAnswersAndNeverProvesAnythingAsUnreachable) {
  Node node(key_, std::chrono::milliseconds(100));
  Node other({key_.nonce, JobSecret::random()});
  node.say(other.self(), "words");
  EXPECT_TRUE(waitFor([&] { return node.lost().find("does not prove") != std::string::npos; }));
  EXPECT_TRUE(other.heard().empty());
}

TEST_F(Members, ShowNoSecret) {
  Node node(key_);
  const View view = viewOf(2, {node.self(), other_});
  node.enter(view);
  Visit visit(node, key_);
  std::string said = encodeQuestion(visit.question);
  visit.peer.say(visit.claimBy(other_, keysOf(other_, {view})));
  said += payloadOf(visit.peer);
  const auto shows = [&](const auto& secret) {
    return said.find(std::string(secret.bytes.begin(), secret.bytes.end())) != std::string::npos;
  };
  EXPECT_FALSE(shows(key_.secret));
  EXPECT_FALSE(shows(view.secret));
}

}  // namespace
}  // namespace torchft_ext
