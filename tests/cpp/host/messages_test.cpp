#include "host/messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "host/schedule.h"
#include "host/turn.h"
#include "net/frame.h"

namespace torchft_ext {
namespace {

// A connection whose frames wait until the test delivers them.
class HeldConnection : public Connection {
 public:
  struct Frame {
    FrameHeader header;
    const uint8_t* payload;
    std::function<void()> sent;
    std::string text{};
  };

  void setReceiver(ConnectionReceiver* /*receiver*/) override {}
  void send(const FrameHeader& header, const uint8_t* payload,
            std::function<void()> sent) override {
    frames.push_back({header, payload, std::move(sent)});
  }
  void sendText(const FrameHeader& header, std::string payload) override {
    EXPECT_EQ(header.length, payload.size());
    frames.push_back({header, nullptr, nullptr, std::move(payload)});
  }
  void resume() override {}
  bool sendQueueEmpty() const override { return frames.empty(); }
  bool hasMoreToRead() const override { return false; }
  bool everythingArrived() const override { return frames.empty(); }
  void close() override { frames.clear(); }
  void detachBuffers() override {}
  void closeAfterTexts(Duration /*at_most*/) override {}

  std::deque<Frame> frames;
};

// The messages of all ranks of a generation. Nothing moves until deliver...() is called.
class MessagesTest : public ::testing::Test {
 protected:
  void connect(int size) {
    const auto world = static_cast<size_t>(size);
    connections.resize(world);
    failures.resize(world);
    for (size_t rank = 0; rank < world; ++rank) {
      connections[rank].resize(world);
      std::vector<Connection*> raw(world);
      for (size_t peer = 0; peer < world; ++peer) {
        if (peer == rank) continue;
        connections[rank][peer] = std::make_unique<HeldConnection>();
        raw[peer] = connections[rank][peer].get();
      }
      messages.push_back(std::make_unique<Messages>(
          static_cast<int>(rank), raw,
          Messages::Callbacks{
              [this, rank](Failure failure) { failures[rank].push_back(failure); },
              [this](std::function<void()> task) { later.push_back(std::move(task)); }}));
    }
  }

  Messages& at(int rank) { return *messages[static_cast<size_t>(rank)]; }
  HeldConnection& line(int from, int to) {
    return *connections[static_cast<size_t>(from)][static_cast<size_t>(to)];
  }

  // The next frame from one rank to another; its kind of receipt.
  Receipt::Kind deliverOne(int from, int to) {
    HeldConnection& connection = line(from, to);
    const HeldConnection::Frame frame = std::move(connection.frames.front());
    connection.frames.pop_front();
    const Receipt receipt = at(to).onHeader(from, frame.header);
    if (receipt.kind == Receipt::Kind::kInto) {
      if (frame.header.length > 0) std::memcpy(receipt.into, frame.payload, frame.header.length);
      at(to).onFrame(from, frame.header);
    } else if (receipt.kind == Receipt::Kind::kText) {
      at(to).onText(from, frame.header, frame.text);
    }
    if (frame.sent) frame.sent();
    return receipt.kind;
  }
  void deliverAll() {
    const int size = static_cast<int>(messages.size());
    for (bool moved = true; moved;) {
      moved = false;
      for (int pair = 0; pair < size * size; ++pair) {
        if (pair / size == pair % size) continue;
        while (!line(pair / size, pair % size).frames.empty()) {
          deliverOne(pair / size, pair % size);
          moved = true;
        }
      }
    }
  }

  static std::shared_ptr<OpState> stateOf(OpKind kind) {
    return std::make_shared<OpState>(std::make_shared<Lifecycle>(GenerationIdentity{}), kind, 7,
                                     Duration{-1});
  }
  static Buffer bufferOf(std::vector<int>& items) {
    return {reinterpret_cast<uint8_t*>(items.data()), items.size() * sizeof(int)};
  }
  std::shared_ptr<OpState> send(int from, int to, std::vector<int>& items, uint64_t tag = 0,
                                DType dtype = DType::kUint8) {
    Operation operation;
    operation.dtype = dtype;
    operation.kind = OpKind::kSend;
    operation.peer = to;
    operation.tag = tag;
    operation.inputs = {bufferOf(items)};
    auto state = stateOf(OpKind::kSend);
    at(from).send(state, operation);
    return state;
  }
  std::shared_ptr<OpState> recv(int to, int from, std::vector<int>& items, uint64_t tag = 0,
                                DType dtype = DType::kUint8) {
    Operation operation;
    operation.dtype = dtype;
    operation.kind = OpKind::kRecv;
    operation.peer = from;
    operation.tag = tag;
    operation.outputs = {bufferOf(items)};
    auto state = stateOf(OpKind::kRecv);
    at(to).recv(state, operation);
    return state;
  }

  std::vector<std::vector<std::unique_ptr<HeldConnection>>> connections;  // [from][to]
  std::vector<std::unique_ptr<Messages>> messages;
  std::vector<std::vector<Failure>> failures;
  std::deque<std::function<void()>> later;  // tasks for another turn
};

using Items = std::vector<int>;

TEST_F(MessagesTest, ASendReachesItsRecvWhicheverComesFirst) {
  connect(2);
  Items first{1, 2}, second{3, 4}, into_first(2), into_second(2);
  const auto early_send = send(0, 1, first);
  deliverAll();
  EXPECT_FALSE(early_send->done());
  const auto late_recv = recv(1, 0, into_first);
  const auto early_recv = recv(1, 0, into_second);
  deliverAll();
  EXPECT_TRUE(early_send->done() && late_recv->done());
  EXPECT_FALSE(early_recv->done());
  const auto late_send = send(0, 1, second);
  deliverAll();
  EXPECT_TRUE(late_send->done() && early_recv->done());
  EXPECT_EQ(into_first, first);
  EXPECT_EQ(into_second, second);
  EXPECT_EQ(late_recv->sourceRank(), 0);
  EXPECT_TRUE(at(0).idle() && at(1).idle());
}

TEST_F(MessagesTest, BytesTravelOnlyWhenTheRecvIsPosted) {
  connect(2);
  Items items{1}, into(1);
  send(0, 1, items);
  ASSERT_EQ(line(0, 1).frames.size(), 1U);
  EXPECT_EQ(line(0, 1).frames[0].header.type, FrameType::kAnnounce);
  deliverAll();
  EXPECT_TRUE(line(0, 1).frames.empty());
  recv(1, 0, into);
  deliverOne(1, 0);
  ASSERT_EQ(line(0, 1).frames.size(), 1U);
  EXPECT_EQ(line(0, 1).frames[0].header.type, FrameType::kMessage);
}

TEST_F(MessagesTest, MatchesInOrderOfIssuePerPeerAndTag) {
  connect(2);
  Items a{1}, b{2}, c{3}, to_a(1), to_b(1), to_c(1);
  send(0, 1, a, 5);
  send(0, 1, c, 6);
  send(0, 1, b, 5);
  deliverAll();
  recv(1, 0, to_c, 6);
  recv(1, 0, to_a, 5);
  recv(1, 0, to_b, 5);
  deliverAll();
  EXPECT_EQ(to_a, a);
  EXPECT_EQ(to_b, b);
  EXPECT_EQ(to_c, c);
}

TEST_F(MessagesTest, AnOutstandingRecvHoldsUpNothing) {
  connect(2);
  Items never(1), items{4}, into(1);
  const auto waits = recv(1, 0, never, 99);
  const auto sent = send(0, 1, items, 1);
  const auto received = recv(1, 0, into, 1);
  deliverAll();
  EXPECT_TRUE(sent->done() && received->done());
  EXPECT_FALSE(waits->done());
  EXPECT_FALSE(at(1).idle());
}

class StridedMessagesTest : public MessagesTest {
 protected:
  // A recv whose bytes go on to every other byte of `apart`.
  std::shared_ptr<OpState> recvApart(int to, int from) {
    Operation operation;
    operation.kind = OpKind::kRecv;
    operation.peer = from;
    operation.outputs = {{close.data(), close.size()}};
    operation.stores.push_back(
        StridedCopy::store(close.data(), {apart.data(), 1, {close.size()}, {2}}));
    auto state = stateOf(OpKind::kRecv);
    at(to).recv(state, std::move(operation));
    return state;
  }
  std::shared_ptr<OpState> sendBytes(int from, int to) {
    Operation operation;
    operation.kind = OpKind::kSend;
    operation.peer = to;
    operation.inputs = {{sent.data(), sent.size()}};
    auto state = stateOf(OpKind::kSend);
    at(from).send(state, std::move(operation));
    return state;
  }
  size_t stored() const {
    return static_cast<size_t>(std::count(apart.begin(), apart.end(), uint8_t{7}));
  }
  void runOneLater() {
    ASSERT_FALSE(later.empty());
    const auto task = std::move(later.front());
    later.pop_front();
    task();
  }

  std::vector<uint8_t> sent = std::vector<uint8_t>(2 * kLocalBytesPerTurn + 100, 7);
  std::vector<uint8_t> close = std::vector<uint8_t>(sent.size(), 0);
  std::vector<uint8_t> apart = std::vector<uint8_t>(2 * sent.size(), 0);
};

TEST_F(StridedMessagesTest, WhatWasReceivedIsStoredInTurnsBeforeASuccessIsTold) {
  for (const int from : {0, 1}) {  // from another, and from oneself
    connect(2);
    std::fill(apart.begin(), apart.end(), uint8_t{0});
    const auto received = recvApart(1, from);
    sendBytes(from, 1);
    deliverAll();
    EXPECT_EQ(stored(), kLocalBytesPerTurn);
    EXPECT_FALSE(received->done());
    EXPECT_FALSE(at(1).idle());
    runOneLater();
    EXPECT_FALSE(received->done());
    runOneLater();
    EXPECT_TRUE(received->done());
    EXPECT_EQ(stored(), sent.size());
    EXPECT_TRUE(at(1).idle());
    messages.clear();
  }
}

TEST_F(StridedMessagesTest, NothingIsStoredOnceItIsCancelled) {
  connect(2);
  const auto received = recvApart(1, 0);
  sendBytes(0, 1);
  deliverAll();
  const auto cancelled = at(1).cancelAll();
  ASSERT_EQ(cancelled.size(), 1U);
  EXPECT_EQ(cancelled[0].first, received);
  const size_t before = stored();
  while (!later.empty()) runOneLater();
  EXPECT_EQ(stored(), before);
  EXPECT_FALSE(received->done());
}

TEST_F(MessagesTest, EmptyMessagesArrive) {
  connect(2);
  Items nothing, into;
  const auto sent = send(0, 1, nothing);
  const auto received = recv(1, 0, into);
  deliverAll();
  EXPECT_TRUE(sent->done() && received->done());
}

TEST_F(MessagesTest, ARecvFromAnyTakesWhatWasAnnouncedFirst) {
  connect(3);
  Items from_two{2}, from_one{1}, into(1), next(1);
  send(2, 0, from_two);
  deliverAll();
  send(1, 0, from_one);
  deliverAll();
  const auto first = recv(0, -1, into);
  const auto second = recv(0, -1, next);
  deliverAll();
  EXPECT_EQ(first->sourceRank(), 2);
  EXPECT_EQ(into, from_two);
  EXPECT_EQ(second->sourceRank(), 1);
  EXPECT_EQ(next, from_one);
}

TEST_F(MessagesTest, AnAnnouncementGoesToTheRecvPostedFirst) {
  connect(3);
  Items any(1), one(1), first{10}, second{20};
  const auto from_any = recv(0, -1, any);
  const auto from_one = recv(0, 1, one);
  send(1, 0, first);
  deliverAll();
  EXPECT_TRUE(from_any->done());
  EXPECT_FALSE(from_one->done());
  send(1, 0, second);
  deliverAll();
  EXPECT_TRUE(from_one->done());
  EXPECT_EQ(any, first);
  EXPECT_EQ(one, second);
}

TEST_F(MessagesTest, ASendToOneselfIsMatchedLocally) {
  connect(1);
  Items items{1, 2, 3}, into(3), back(3);
  const auto sent = send(0, 0, items);
  EXPECT_FALSE(sent->done());
  const auto received = recv(0, 0, into);
  EXPECT_TRUE(sent->done() && received->done());
  EXPECT_EQ(into, items);
  const auto posted = recv(0, -1, back);
  send(0, 0, items);
  EXPECT_TRUE(posted->done());
  EXPECT_EQ(posted->sourceRank(), 0);
  EXPECT_EQ(back, items);
}

TEST_F(MessagesTest, AnotherSizeIsAMismatchThatNamesBoth) {
  connect(2);
  Items items{1, 2, 3}, into(2);
  send(0, 1, items);
  const auto received = recv(1, 0, into);
  deliverAll();
  ASSERT_EQ(failures[1].size(), 1U);
  const Failure& failure = failures[1][0];
  EXPECT_EQ(failure.kind, FailureKind::kMismatch);
  EXPECT_EQ(failure.cause.rank, 0);
  EXPECT_EQ(failure.op, "recv");
  EXPECT_EQ(failure.seq, 7);
  EXPECT_NE(failure.cause.how.find("12 bytes"), std::string::npos) << failure.cause.how;
  EXPECT_NE(failure.cause.how.find("8 bytes"), std::string::npos) << failure.cause.how;
  EXPECT_EQ(into, (Items{0, 0}));
  EXPECT_EQ(at(1).cancelAll().size(), 1U) << "the recv is still pending";
}

FrameHeader frameOf(FrameType type, uint64_t seq, uint64_t length = 0) {
  FrameHeader header;
  header.type = type;
  header.seq = seq;
  header.length = length;
  return header;
}

TEST_F(MessagesTest, AnotherDtypeOfTheSameSizeIsAMismatchThatNamesBoth) {
  connect(2);
  Items items{1, 2}, into(2);
  const auto sent = send(0, 1, items, 5, DType::kInt32);
  const auto received = recv(1, 0, into, 5, DType::kFloat);
  deliverAll();
  ASSERT_EQ(failures[1].size(), 1U);
  const Failure& failure = failures[1][0];
  EXPECT_EQ(failure.kind, FailureKind::kMismatch);
  EXPECT_EQ(failure.cause.rank, 0);
  EXPECT_EQ(failure.cause.how,
            "it issued send of int32 (tag 5), but the matching recv on rank 1 expects float32");
  EXPECT_FALSE(sent->done() || received->done());
  EXPECT_EQ(into, (Items{0, 0}));
}

TEST_F(MessagesTest, MessagesWithoutBytesAreNotComparedByDtype) {
  connect(2);
  Items none, into;
  const auto sent = send(0, 1, none, 5, DType::kInt32);
  const auto received = recv(1, 0, into, 5, DType::kFloat);
  deliverAll();
  EXPECT_TRUE(failures[1].empty());
  EXPECT_TRUE(sent->done() && received->done());
}

// What an announcement has as payload.
std::string signatureText() {
  ByteWriter payload;
  payload.u64(signatureOfMessage(Operation().dtype));
  return payload.take();
}

TEST_F(MessagesTest, FramesThatFollowFromNothingBreakTheConnection) {
  connect(2);
  Items items{1}, into(1);
  send(0, 1, items);
  recv(0, 1, into);
  const auto breaks = [&](const FrameHeader& header) {
    return at(0).onHeader(1, header).kind == Receipt::Kind::kBreak;
  };
  EXPECT_TRUE(breaks(frameOf(FrameType::kClear, 1))) << "a send that does not exist";
  EXPECT_TRUE(breaks(frameOf(FrameType::kMessage, 0, 4))) << "bytes that were not asked for";
  EXPECT_TRUE(breaks(frameOf(FrameType::kAnnounce, 3, 8))) << "announcements were skipped";
  EXPECT_TRUE(breaks(frameOf(FrameType::kAnnounce, 0, 5))) << "a payload that is no signature";
  EXPECT_TRUE(breaks(frameOf(FrameType::kAnnounce, 0))) << "an announcement without a dtype";
  EXPECT_FALSE(breaks(frameOf(FrameType::kClear, 0)));
  at(0).onText(1, frameOf(FrameType::kClear, 0));
  EXPECT_TRUE(breaks(frameOf(FrameType::kClear, 0))) << "cleared twice";
}

TEST_F(MessagesTest, AMessageOfAnotherLengthThanAnnouncedBreaksTheConnection) {
  connect(2);
  Items into(1);
  recv(0, 1, into);
  FrameHeader announce = frameOf(FrameType::kAnnounce, 0);
  announce.aux = sizeof(int);
  at(0).onText(1, announce, signatureText());
  EXPECT_EQ(at(0).onHeader(1, frameOf(FrameType::kMessage, 0, 5)).kind, Receipt::Kind::kBreak);
  EXPECT_EQ(at(0).onHeader(1, frameOf(FrameType::kMessage, 0, 4)).kind, Receipt::Kind::kInto);
}

TEST_F(MessagesTest, EndlessAnnouncementsFailTheGeneration) {
  connect(2);
  uint64_t number = 0;
  while (failures[0].empty() && number < (uint64_t{1} << 21)) {
    const FrameHeader announce = frameOf(FrameType::kAnnounce, number++, 8);
    if (at(0).onHeader(1, announce).kind == Receipt::Kind::kText)
      at(0).onText(1, announce, signatureText());
  }
  ASSERT_EQ(failures[0].size(), 1U);
  EXPECT_EQ(failures[0][0].cause.rank, 1);
}

TEST_F(MessagesTest, NeedsAPeerForWhatOnlyItCanDo) {
  connect(3);
  Items items{1}, into(1), any(1);
  EXPECT_FALSE(at(0).needs(1));
  send(0, 1, items);
  EXPECT_TRUE(at(0).needs(1)) << "the send is not done";
  EXPECT_FALSE(at(0).needs(2));
  recv(0, 2, into);
  EXPECT_TRUE(at(0).needs(2));
  recv(1, -1, any, 8);
  EXPECT_FALSE(at(1).needs(0)) << "rank 2 may still send";
  at(1).peerLeft(2);
  EXPECT_TRUE(at(1).needs(0)) << "it is the last that may send";
}

TEST_F(MessagesTest, WhatADepartedPeerAnnouncedIsForgotten) {
  connect(2);
  Items items{1}, into(1);
  send(0, 1, items);
  deliverAll();
  at(1).peerLeft(0);
  const auto received = recv(1, 0, into);
  EXPECT_TRUE(at(1).needs(0));
  EXPECT_FALSE(received->done());
  EXPECT_TRUE(line(1, 0).frames.empty());
}

TEST_F(MessagesTest, CancelReturnsEverythingPendingAndCompletesNothing) {
  connect(2);
  Items items{1}, under_way{2}, into(1), posted(1);
  const auto waiting = send(0, 1, items, 1);
  const auto cleared = send(0, 1, under_way, 2);
  const auto expected = recv(1, 0, into, 2);
  const auto not_sent = recv(1, 0, posted, 3);
  deliverOne(0, 1);
  deliverOne(0, 1);
  deliverOne(1, 0);
  EXPECT_EQ(at(0).cancelAll().size(), 2U);
  EXPECT_EQ(at(1).cancelAll().size(), 2U);
  EXPECT_TRUE(at(0).idle() && at(1).idle());
  EXPECT_EQ(deliverOne(0, 1), Receipt::Kind::kWait) << "nothing is read any more";
  EXPECT_FALSE(waiting->done() || cleared->done() || expected->done() || not_sent->done());
  EXPECT_EQ(into, Items{0});
}

TEST_F(MessagesTest, AMessageWaitsForItsPeerUntilThatHasIssuedTheOtherHalf) {
  connect(3);
  Items sent{1}, received(1), from_any(1);
  const auto from_two = recv(0, 2, received, 7);
  const auto to_one = send(0, 1, sent);
  const auto any = recv(0, -1, from_any, kEngineTag | 5);
  EXPECT_EQ(at(0).unmatched(*from_two).peers, std::vector<int>({2}));
  EXPECT_EQ(at(0).unmatched(*to_one).peers, std::vector<int>({1}));
  EXPECT_FALSE(at(0).unmatched(*from_two).of_engine || at(0).unmatched(*to_one).of_engine);
  EXPECT_EQ(at(0).unmatched(*any).peers, std::vector<int>({1, 2}));
  EXPECT_TRUE(at(0).unmatched(*any).of_engine);
  const auto other_half = send(2, 0, sent, 7);
  const auto other_end = recv(1, 0, received);
  deliverAll();
  for (const auto& op : {from_two, to_one}) EXPECT_TRUE(at(0).unmatched(*op).peers.empty());
}

}  // namespace
}  // namespace torchft_ext
