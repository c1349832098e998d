#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <optional>
#include <random>

#include "cpp/host/connection_support.h"
#include "host/connection.h"

namespace torchft_ext {
namespace {

constexpr Duration kLong = std::chrono::seconds(60);

// One connection under test, with a raw socket or another connection at its far end.
class StreamConnectionTest : public ::testing::TestWithParam<Transport> {
 protected:
  void connect(int buffer_bytes = 0) {
    SocketPair pair = connectedPair(GetParam(), buffer_bytes);
    far_fd = std::move(pair.second);
    test.on(
        [&] { connection = makeStreamConnection(test.loop(), std::move(pair.first), traffic); });
    receiver.takeEverything();
    far_receiver.takeEverything();
  }
  void makeConnections(int buffer_bytes = 0) {
    connect(buffer_bytes);
    test.on([&] {
      far_connection = makeStreamConnection(test.loop(), std::move(far_fd), far_traffic);
    });
  }
  void TearDown() override {
    test.on([&] {
      connection.reset();
      far_connection.reset();
    });
  }
  void writeRaw(const void* data, size_t bytes) {
    const auto* next = static_cast<const uint8_t*>(data);
    ASSERT_TRUE(waitFor([&] {
      const ssize_t count = ::send(far_fd.get(), next, bytes, MSG_NOSIGNAL);
      if (count > 0) {
        next += count;
        bytes -= static_cast<size_t>(count);
      }
      return bytes == 0;
    }));
  }
  // What the connection wrote, until it closed its side.
  std::string readRawToEnd() {
    std::string all;
    char buffer[4096];
    EXPECT_TRUE(waitFor([&] {
      ssize_t count = 0;
      while ((count = ::recv(far_fd.get(), buffer, sizeof(buffer), 0)) > 0) {
        all.append(buffer, static_cast<size_t>(count));
      }
      return count == 0 || errno == ECONNRESET;
    }));
    return all;
  }

  TestLoop test;
  RecordingReceiver receiver;
  RecordingReceiver far_receiver;
  UniqueFd far_fd;
  const std::shared_ptr<Traffic> traffic = std::make_shared<Traffic>();
  const std::shared_ptr<Traffic> far_traffic = std::make_shared<Traffic>();
  std::shared_ptr<Connection> connection;
  std::shared_ptr<Connection> far_connection;
};

TEST_P(StreamConnectionTest, DeliversFramesOfAllSizesInOrder) {
  makeConnections();
  std::vector<std::vector<uint8_t>> payloads;
  size_t with_headers = 0;
  for (const size_t bytes : {0UL, 1UL, 39UL, 4096UL, 5000UL, 100'003UL, 5UL << 20, 0UL, 7UL}) {
    payloads.push_back(patternOf(bytes, static_cast<uint8_t>(bytes)));
    with_headers += kFrameHeaderBytes + bytes;
  }
  size_t sent = 0;
  test.on([&] {
    connection->setReceiver(&receiver);
    for (size_t i = 0; i < payloads.size(); ++i) {
      far_connection->send(frameOf(FrameType::kData, payloads[i].size(), i), payloads[i].data(),
                           [&sent] { ++sent; });
    }
  });
  EXPECT_TRUE(test.eventually([&] { return receiver.frames.size() == payloads.size(); }));
  EXPECT_TRUE(test.eventually([&] { return sent == payloads.size(); }));
  test.on([&] {
    EXPECT_EQ(receiver.buffers, payloads);
    for (size_t i = 0; i < payloads.size(); ++i) EXPECT_EQ(receiver.frames[i], i);
    EXPECT_TRUE(far_connection->sendQueueEmpty());
    EXPECT_EQ(far_traffic->sent, with_headers);
    EXPECT_EQ(traffic->received, with_headers);
  });
}

TEST_P(StreamConnectionTest, TextsAndPayloadsKeepTheirOrder) {
  makeConnections();
  const auto payload = patternOf(3 << 20);
  test.on([&] {
    connection->setReceiver(&receiver);
    far_connection->sendText(frameOf(FrameType::kFailed, 5, 1), "first");
    far_connection->send(frameOf(FrameType::kData, payload.size(), 2), payload.data(), nullptr);
    far_connection->sendText(frameOf(FrameType::kGoodbye, 0, 3), "");
  });
  EXPECT_TRUE(test.eventually([&] { return receiver.texts.size() == 2; }));
  test.on([&] {
    EXPECT_EQ(receiver.offered, (std::vector<uint64_t>{1, 2, 3}));
    EXPECT_EQ(receiver.texts[0].second, "first");
    EXPECT_EQ(receiver.buffers[0], payload);
  });
}

TEST_P(StreamConnectionTest, UnderstandsAStreamCutAnywhere) {
  connect();
  test.on([&] { connection->setReceiver(&receiver); });
  std::string stream;
  std::vector<std::vector<uint8_t>> payloads;
  for (size_t i = 0; i < 60; ++i) {
    payloads.push_back(patternOf(i * i, static_cast<uint8_t>(i)));
    const FrameBytes header = encodeHeader(frameOf(FrameType::kData, payloads[i].size(), i));
    stream.append(header.begin(), header.end());
    stream.append(payloads[i].begin(), payloads[i].end());
  }
  std::mt19937 random(3);
  for (size_t begin = 0; begin < stream.size();) {
    const size_t part = std::min<size_t>(stream.size() - begin, 1 + random() % 700);
    writeRaw(stream.data() + begin, part);
    begin += part;
    if (random() % 2 == 0) test.settle();
  }
  EXPECT_TRUE(test.eventually([&] { return receiver.frames.size() == payloads.size(); }));
  test.on([&] { EXPECT_EQ(receiver.buffers, payloads); });
}

TEST_P(StreamConnectionTest, SentMeansThatTheKernelHasAllBytes) {
  makeConnections(16 * 1024);
  const auto payload = patternOf(8 << 20);
  bool sent = false;
  test.on([&] {
    far_connection->send(frameOf(FrameType::kData, payload.size()), payload.data(),
                         [&] { sent = true; });
  });
  test.settle();
  test.on([&] {
    EXPECT_FALSE(sent) << "nobody has read yet";
    EXPECT_FALSE(far_connection->sendQueueEmpty());
    connection->setReceiver(&receiver);
  });
  EXPECT_TRUE(test.eventually([&] { return sent && !receiver.frames.empty(); }));
  test.on([&] { EXPECT_EQ(receiver.buffers[0], payload); });
}

TEST_P(StreamConnectionTest, CallsNobodyBackFromInsideSendOrResume) {
  makeConnections();
  bool inside = false;
  bool called_inside = false;
  int called = 0;
  const uint8_t byte = 1;
  receiver.answer = [&](const FrameHeader&) {
    called_inside |= inside;
    Receipt receipt;
    receipt.kind = Receipt::Kind::kWait;
    return receipt;
  };
  test.on([&] {
    connection->setReceiver(&receiver);
    inside = true;
    far_connection->send(frameOf(FrameType::kData, 1), &byte, [&] {
      called_inside |= inside;
      ++called;
    });
    inside = false;
  });
  EXPECT_TRUE(test.eventually([&] { return called == 1 && receiver.offered.size() == 1; }));
  test.on([&] {
    inside = true;
    connection->resume();
    inside = false;
  });
  EXPECT_TRUE(test.eventually([&] { return receiver.offered.size() == 2; }));
  test.on([&] { EXPECT_FALSE(called_inside); });
}

TEST_P(StreamConnectionTest, AWaitingFrameIsOfferedAgainAfterEachResume) {
  makeConnections();
  const auto payload = patternOf(100);
  bool ready = false;
  const auto take = receiver.answer;
  receiver.answer = [&, take](const FrameHeader& header) {
    if (ready) return take(header);
    Receipt receipt;
    receipt.kind = Receipt::Kind::kWait;
    return receipt;
  };
  test.on([&] {
    connection->setReceiver(&receiver);
    for (uint64_t i = 0; i < 3; ++i) {
      far_connection->send(frameOf(FrameType::kData, payload.size(), i), payload.data(), nullptr);
    }
  });
  EXPECT_TRUE(test.eventually([&] { return receiver.offered.size() == 1; }));
  test.on([&] { connection->resume(); });
  EXPECT_TRUE(test.eventually([&] { return receiver.offered.size() == 2; }));
  test.settle();
  test.on([&] {
    EXPECT_EQ(receiver.offered, (std::vector<uint64_t>{0, 0})) << "offered without resume()";
    EXPECT_TRUE(receiver.frames.empty());
    ready = true;
    connection->resume();
  });
  EXPECT_TRUE(test.eventually([&] { return receiver.frames.size() == 3; }));
}

TEST_P(StreamConnectionTest, APausedConnectionStillSends) {
  makeConnections(16 * 1024);
  const auto payload = patternOf(2 << 20);
  bool sent = false;
  receiver.answer = [](const FrameHeader&) {
    Receipt receipt;
    receipt.kind = Receipt::Kind::kWait;
    return receipt;
  };
  test.on([&] {
    connection->setReceiver(&receiver);
    far_connection->sendText(frameOf(FrameType::kGoodbye, 0), "");
  });
  EXPECT_TRUE(test.eventually([&] { return receiver.offered.size() == 1; }));
  test.on([&] {
    far_connection->setReceiver(&far_receiver);
    connection->send(frameOf(FrameType::kData, payload.size()), payload.data(),
                     [&] { sent = true; });
  });
  EXPECT_TRUE(test.eventually([&] { return sent && far_receiver.frames.size() == 1; }));
}

TEST_P(StreamConnectionTest, BreaksOnGarbage) {
  connect();
  test.on([&] { connection->setReceiver(&receiver); });
  const std::string garbage(200, 'x');
  writeRaw(garbage.data(), garbage.size());
  EXPECT_TRUE(test.eventually([&] { return receiver.broken == 1; }));
  test.on([&] {
    EXPECT_FALSE(receiver.clean);
    EXPECT_TRUE(receiver.offered.empty());
  });
}

TEST_P(StreamConnectionTest, BreaksOnATextLongerThanItsTypeMayBe) {
  connect();
  test.on([&] { connection->setReceiver(&receiver); });
  const FrameBytes header = encodeHeader(frameOf(FrameType::kFailed, uint64_t{1} << 40));
  writeRaw(header.data(), header.size());
  EXPECT_TRUE(test.eventually([&] { return receiver.broken == 1; }));
  test.on([&] { EXPECT_FALSE(receiver.clean); });
}

TEST_P(StreamConnectionTest, BreaksWithTheReceiversReason) {
  makeConnections();
  receiver.answer = [](const FrameHeader&) {
    Receipt receipt;
    receipt.why = "nobody wants this";
    return receipt;
  };
  test.on([&] {
    connection->setReceiver(&receiver);
    far_connection->sendText(frameOf(FrameType::kGoodbye, 0), "");
  });
  EXPECT_TRUE(test.eventually([&] { return receiver.broken == 1; }));
  test.on([&] { EXPECT_EQ(receiver.why, "nobody wants this"); });
}

TEST_P(StreamConnectionTest, AnEndBetweenFramesIsClean) {
  connect();
  test.on([&] { connection->setReceiver(&receiver); });
  const FrameBytes header = encodeHeader(frameOf(FrameType::kGoodbye, 0, 9));
  writeRaw(header.data(), header.size());
  far_fd.reset();
  EXPECT_TRUE(test.eventually([&] { return receiver.broken == 1; }));
  test.on([&] {
    EXPECT_TRUE(receiver.clean);
    EXPECT_EQ(receiver.texts.size(), 1U) << "what came before the end was lost";
  });
}

TEST_P(StreamConnectionTest, AnEndInsideAHeaderIsNotClean) {
  connect();
  test.on([&] { connection->setReceiver(&receiver); });
  const FrameBytes header = encodeHeader(frameOf(FrameType::kGoodbye, 0));
  writeRaw(header.data(), 11);
  far_fd.reset();
  EXPECT_TRUE(test.eventually([&] { return receiver.broken == 1; }));
  test.on([&] { EXPECT_FALSE(receiver.clean); });
}

TEST_P(StreamConnectionTest, AnEndInsideAPayloadIsNotClean) {
  connect();
  test.on([&] { connection->setReceiver(&receiver); });
  const FrameBytes header = encodeHeader(frameOf(FrameType::kData, 10));
  writeRaw(header.data(), header.size());
  writeRaw("abc", 3);
  far_fd.reset();
  EXPECT_TRUE(test.eventually([&] { return receiver.broken == 1; }));
  test.on([&] {
    EXPECT_FALSE(receiver.clean);
    EXPECT_TRUE(receiver.frames.empty());
  });
}

// The way a process with unread input dies: the kernel resets its connections.
TEST_P(StreamConnectionTest, AResetIsToldEvenWhilePaused) {
  connect();
  receiver.answer = [](const FrameHeader&) {
    Receipt receipt;
    receipt.kind = Receipt::Kind::kWait;
    return receipt;
  };
  test.on([&] { connection->setReceiver(&receiver); });
  const FrameBytes header = encodeHeader(frameOf(FrameType::kData, 1));
  writeRaw(header.data(), header.size());
  EXPECT_TRUE(test.eventually([&] { return receiver.offered.size() == 1; }));
  test.on([&] {
    connection->sendText(frameOf(FrameType::kGoodbye, 0), {});
  });  // the far end leaves it unread
  const linger at_once{1, 0};
  ::setsockopt(far_fd.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  far_fd.reset();
  EXPECT_TRUE(test.eventually([&] { return receiver.broken == 1; }));
  test.on([&] { EXPECT_FALSE(receiver.clean); });
}

// Who leaves in order closes its sockets while others have yet to issue what they receive.
TEST_P(StreamConnectionTest, WhatArrivedBeforeAnOrderlyEndIsStillThereAfterAPause) {
  connect();
  bool wanted = false;
  uint32_t value = 0;
  receiver.answer = [&](const FrameHeader&) {
    Receipt receipt;
    receipt.kind = wanted ? Receipt::Kind::kInto : Receipt::Kind::kWait;
    receipt.into = reinterpret_cast<uint8_t*>(&value);
    return receipt;
  };
  test.on([&] { connection->setReceiver(&receiver); });
  const FrameBytes header = encodeHeader(frameOf(FrameType::kData, sizeof(value)));
  const uint32_t sent = 0x01020304;
  writeRaw(header.data(), header.size());
  writeRaw(&sent, sizeof(sent));
  EXPECT_TRUE(test.eventually([&] { return receiver.offered.size() == 1; }));
  far_fd.reset();
  for (int turn = 0; turn < 20; ++turn) test.on([&] { EXPECT_EQ(receiver.broken, 0); });
  test.on([&] {
    wanted = true;
    connection->resume();
  });
  EXPECT_TRUE(test.eventually([&] { return receiver.broken == 1; }));
  test.on([&] {
    EXPECT_TRUE(receiver.clean);
    EXPECT_EQ(value, sent);
  });
}

TEST_P(StreamConnectionTest, WhatArrivedBeforeASendFailedIsStillDelivered) {
  connect();
  const FrameBytes header = encodeHeader(frameOf(FrameType::kFailed, 4, 5));
  writeRaw(header.data(), header.size());
  writeRaw("dead", 4);
  far_fd.reset();
  const auto payload = patternOf(1 << 20);
  test.on([&] {
    connection->setReceiver(&receiver);
    for (int i = 0; i < 4; ++i) {
      connection->send(frameOf(FrameType::kData, payload.size()), payload.data(), nullptr);
    }
  });
  EXPECT_TRUE(test.eventually([&] { return receiver.broken == 1; }));
  test.on([&] {
    ASSERT_EQ(receiver.texts.size(), 1U);
    EXPECT_EQ(receiver.texts[0].second, "dead");
  });
}

TEST_P(StreamConnectionTest, NothingIsCalledAfterClose) {
  makeConnections();
  const uint8_t byte = 1;
  int called = 0;
  test.on([&] {
    connection->setReceiver(&receiver);
    far_connection->setReceiver(&far_receiver);
    far_connection->send(frameOf(FrameType::kData, 1), &byte, [&] { ++called; });
    connection->send(frameOf(FrameType::kData, 1), &byte, [&] { ++called; });
    connection->close();
    far_connection->close();
  });
  test.settle();
  test.on([&] {
    EXPECT_EQ(called, 0);
    EXPECT_EQ(receiver.broken + far_receiver.broken, 0);
    EXPECT_TRUE(receiver.offered.empty());
  });
}

TEST_P(StreamConnectionTest, MayBeDestroyedByItsReceiver) {
  makeConnections();
  const uint8_t byte = 1;
  receiver.on_frame = [&](const FrameHeader&) { connection.reset(); };
  test.on([&] {
    connection->setReceiver(&receiver);
    for (uint64_t i = 0; i < 3; ++i)
      far_connection->send(frameOf(FrameType::kData, 1, i), &byte, nullptr);
  });
  EXPECT_TRUE(test.eventually([&] { return connection == nullptr; }));
  test.settle();
  test.on([&] { EXPECT_EQ(receiver.frames.size(), 1U); });
}

TEST_P(StreamConnectionTest, MayBeDestroyedByASentCallback) {
  makeConnections();
  const uint8_t byte = 1;
  int called = 0;
  test.on([&] {
    for (int i = 0; i < 3; ++i) {
      connection->send(frameOf(FrameType::kData, 1), &byte, [&] {
        ++called;
        connection.reset();
      });
    }
  });
  EXPECT_TRUE(test.eventually([&] { return connection == nullptr; }));
  test.settle();
  test.on([&] { EXPECT_EQ(called, 1); });
}

TEST_P(StreamConnectionTest, SaysItsLastTextsBeforeItCloses) {
  makeConnections(16 * 1024);
  const std::string text(16'000, 't');
  test.on([&] {
    for (uint64_t i = 0; i < 40; ++i)
      connection->sendText(frameOf(FrameType::kFailed, text.size(), i), text);
    EXPECT_FALSE(connection->sendQueueEmpty()) << "the test needs a full socket";
    connection->closeAfterTexts(kLong);
  });
  test.settle();
  test.on([&] { far_connection->setReceiver(&far_receiver); });
  EXPECT_TRUE(test.eventually([&] { return far_receiver.broken == 1; }));
  test.on([&] {
    EXPECT_EQ(far_receiver.texts.size(), 40U);
    EXPECT_TRUE(far_receiver.clean);
  });
}

TEST_P(StreamConnectionTest, LastTextsReachAPeerThatKeepsSending) {
  makeConnections();
  const auto payload = patternOf(4 << 20);
  test.on([&] {
    far_connection->setReceiver(&far_receiver);
    far_connection->send(frameOf(FrameType::kData, payload.size()), payload.data(), nullptr);
    connection->sendText(frameOf(FrameType::kFailed, 2, 1), "no");
    connection->closeAfterTexts(kLong);
  });
  EXPECT_TRUE(test.eventually([&] { return far_receiver.broken == 1; }));
  test.on([&] { EXPECT_EQ(far_receiver.texts.size(), 1U); });
}

TEST_P(StreamConnectionTest, DropsUserPayloadsThatHaveNotBegunWhenItCloses) {
  connect();
  const std::string text(16'000, 't');
  const auto payload = patternOf(100);
  bool sent = false;
  test.on([&] {
    do {
      connection->sendText(frameOf(FrameType::kFailed, text.size()), text);
    } while (connection->sendQueueEmpty());
    connection->send(frameOf(FrameType::kData, payload.size(), 1), payload.data(),
                     [&] { sent = true; });
    connection->sendText(frameOf(FrameType::kGoodbye, 0), "");
    connection->closeAfterTexts(kLong);
  });
  const std::string all = readRawToEnd();
  const FrameBytes goodbye = encodeHeader(frameOf(FrameType::kGoodbye, 0));
  EXPECT_EQ((all.size() - kFrameHeaderBytes) % (text.size() + kFrameHeaderBytes), 0U)
      << "only texts and a goodbye";
  EXPECT_EQ(all.substr(all.size() - kFrameHeaderBytes),
            std::string(goodbye.begin(), goodbye.end()));
  test.on([&] { EXPECT_FALSE(sent); });
}

TEST_P(StreamConnectionTest, CompletesABegunPayloadFromACopyBeforeItsFinalFrame) {
  connect(16 * 1024);
  const auto original = patternOf(512 << 10);
  auto payload = original;
  test.on([&] {
    connection->send(frameOf(FrameType::kMessage, payload.size()), payload.data(), nullptr);
    EXPECT_FALSE(connection->sendQueueEmpty());
    connection->sendText(frameOf(FrameType::kGoodbye, 0), "");
    connection->closeAfterTexts(kLong);
    std::fill(payload.begin(), payload.end(), uint8_t{0});  // the user's again
  });
  const std::string all = readRawToEnd();
  ASSERT_EQ(all.size(), 2 * kFrameHeaderBytes + original.size());
  EXPECT_EQ(all.substr(kFrameHeaderBytes, original.size()),
            std::string(original.begin(), original.end()));
}

TEST_P(StreamConnectionTest, ClosesAtOnceInsideAUserPayload) {
  makeConnections(16 * 1024);
  const auto payload = patternOf(8 << 20);
  test.on([&] {
    connection->send(frameOf(FrameType::kData, payload.size()), payload.data(), nullptr);
    EXPECT_FALSE(connection->sendQueueEmpty());
    connection->sendText(frameOf(FrameType::kGoodbye, 0), "");
    connection->closeAfterTexts(kLong);
    far_connection->setReceiver(&far_receiver);
  });
  EXPECT_TRUE(test.eventually([&] { return far_receiver.broken == 1; }));
  test.on([&] {
    EXPECT_FALSE(far_receiver.clean);
    EXPECT_TRUE(far_receiver.texts.empty());
  });
}

TEST_P(StreamConnectionTest, DetachedTouchesNothingMoreAndStillSaysItsLastTexts) {
  makeConnections(16 * 1024);
  const auto original = patternOf(512 << 10);
  auto payload = original;
  const std::vector<uint8_t> unread(1000, 7);
  test.on([&] {
    connection->setReceiver(&receiver);
    connection->send(frameOf(FrameType::kData, payload.size()), payload.data(), nullptr);
    EXPECT_FALSE(connection->sendQueueEmpty()) << "the test needs a full socket";
    connection->detachBuffers();
    std::fill(payload.begin(), payload.end(), uint8_t{0});  // the user's again
    far_connection->send(frameOf(FrameType::kData, unread.size()), unread.data(), nullptr);
  });
  test.settle();
  test.on([&] {
    EXPECT_TRUE(receiver.offered.empty());
    connection->sendText(frameOf(FrameType::kGoodbye, 0), "");
    connection->closeAfterTexts(kLong);
    far_connection->setReceiver(&far_receiver);
  });
  EXPECT_TRUE(test.eventually([&] { return far_receiver.broken == 1; }));
  test.on([&] {
    EXPECT_TRUE(far_receiver.clean);
    ASSERT_EQ(far_receiver.buffers.size(), 1U);
    EXPECT_EQ(far_receiver.buffers.front(), original);
    EXPECT_EQ(far_receiver.texts.size(), 1U);
    EXPECT_EQ(receiver.broken, 0);
  });
}

TEST_P(StreamConnectionTest, GivesUpOnAPeerThatDoesNotCloseInTime) {
  connect();
  test.on([&] { connection->closeAfterTexts(milliseconds(20)); });
  EXPECT_EQ(readRawToEnd(), "");
  // Closed for good: what is written to it now is answered with a reset.
  EXPECT_TRUE(
      waitFor([&] { return ::send(far_fd.get(), "x", 1, MSG_NOSIGNAL) < 0 && errno != EAGAIN; }));
}

INSTANTIATE_TEST_SUITE_P(Tcp, StreamConnectionTest, ::testing::Values(Transport::kTcp));
INSTANTIATE_TEST_SUITE_P(Local, StreamConnectionTest, ::testing::Values(Transport::kLocal));

}  // namespace
}  // namespace torchft_ext
