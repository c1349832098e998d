#include "net/frame.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <random>

#include "base/unique_fd.h"
#include "net/frame_inbox.h"
#include "net/handshake.h"

namespace torchft_ext {
namespace {

FrameBytes headerBytes(FrameType type, uint64_t length = 0) {
  FrameHeader header;
  header.type = type;
  header.length = length;
  return encodeHeader(header);
}

TEST(Frame, HeaderReadsBack) {
  FrameHeader header{FrameType::kMessage, 0x0102030405060708, 2, ~0ULL, 4};
  std::string why;
  const auto read = decodeHeader(encodeHeader(header), &why);
  ASSERT_TRUE(read) << why;
  EXPECT_EQ(read->type, FrameType::kMessage);
  EXPECT_EQ(read->length, 0x0102030405060708U);
  EXPECT_EQ(read->seq, 2U);
  EXPECT_EQ(read->tag, ~0ULL);
  EXPECT_EQ(read->aux, 4U);
}

TEST(Frame, HeaderIsLittleEndian) {
  FrameHeader header;
  header.type = FrameType::kData;
  header.length = 0x0201;
  const FrameBytes bytes = encodeHeader(header);
  EXPECT_EQ(bytes[0], kFrameMagic & 0xffU);
  EXPECT_EQ(bytes[4], kWireVersion);
  EXPECT_EQ(bytes[6], 10);
  EXPECT_EQ(bytes[8], 1);
  EXPECT_EQ(bytes[9], 2);
}

TEST(Frame, RefusesWrongMagicVersionAndType) {
  std::string why;
  FrameBytes bytes = headerBytes(FrameType::kBeat);
  bytes[0] ^= 1U;
  EXPECT_FALSE(decodeHeader(bytes, &why));
  EXPECT_NE(why.find("magic"), std::string::npos) << why;

  bytes = headerBytes(FrameType::kBeat);
  bytes[4] = 77;
  EXPECT_FALSE(decodeHeader(bytes, &why));
  EXPECT_NE(why.find("wire version " + std::to_string(kWireVersion) + ", found 77"),
            std::string::npos)
      << why;
  EXPECT_EQ(versionOf(bytes), 77);

  bytes = headerBytes(static_cast<FrameType>(999));
  EXPECT_FALSE(decodeHeader(bytes, &why));
  EXPECT_NE(why.find("999"), std::string::npos) << why;
}

TEST(Frame, ControlFramesAreBounded) {
  for (const FrameType type :
       {FrameType::kHello, FrameType::kWelcome, FrameType::kRefused, FrameType::kFailed,
        FrameType::kGoodbye, FrameType::kBeat, FrameType::kAnnounce}) {
    EXPECT_LE(longestPayload(type), 65536U);
  }
}

TEST(Bytes, ReadBackWhatWasWritten) {
  ByteWriter out;
  out.u8(1);
  out.u16(0x0203);
  out.u32(0x04050607);
  out.u64(~1ULL);
  out.i64(-5);
  out.text("hello");
  const std::string bytes = out.take();
  ByteReader in(bytes);
  EXPECT_EQ(in.u8(), 1);
  EXPECT_EQ(in.u16(), 0x0203);
  EXPECT_EQ(in.u32(), 0x04050607U);
  EXPECT_EQ(in.u64(), ~1ULL);
  EXPECT_EQ(in.i64(), -5);
  EXPECT_EQ(in.text(5), "hello");
  EXPECT_TRUE(in.atEnd());
}

TEST(Bytes, EverythingIsZeroAfterTheEnd) {
  ByteReader in("ab");
  EXPECT_EQ(in.u32(), 0U);
  EXPECT_FALSE(in.ok());
  EXPECT_EQ(in.u8(), 0) << "two bytes were left, but a read had failed";
  std::array<uint8_t, 4> raw{9, 9, 9, 9};
  in.raw(raw);
  EXPECT_EQ(raw, (std::array<uint8_t, 4>{}));
  EXPECT_FALSE(in.atEnd());
}

TEST(Bytes, TextLongerThanAllowedIsRefused) {
  ByteWriter out;
  out.text("hello");
  const std::string bytes = out.take();
  ByteReader in(bytes);
  EXPECT_EQ(in.text(4), "");
  EXPECT_FALSE(in.ok());
}

TEST(Bytes, TextWithALyingLengthIsRefused) {
  ByteWriter out;
  out.u32(0xffffffff);
  out.u8('x');
  const std::string bytes = out.take();
  ByteReader in(bytes);
  EXPECT_EQ(in.text(~size_t{0}), "");
  EXPECT_FALSE(in.ok());
}

Hello someHello() {
  Hello hello;
  hello.nonce = Nonce::random();
  hello.proof = GenerationSecret::random().connector;
  hello.from = Incarnation::random();
  hello.to = Incarnation::random();
  hello.rank = 7;
  hello.channel = 1;
  return hello;
}

std::string payloadOf(const std::string& frame) {
  return frame.substr(kFrameHeaderBytes);
}

TEST(Handshake, HelloReadsBack) {
  const Hello hello = someHello();
  const auto read = decodeHello(payloadOf(encodeHello(hello)));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->nonce, hello.nonce);
  EXPECT_EQ(read->proof, hello.proof);
  EXPECT_EQ(read->from, hello.from);
  EXPECT_EQ(read->to, hello.to);
  EXPECT_EQ(read->rank, 7);
  EXPECT_EQ(read->channel, 1);
}

TEST(Handshake, TruncatedOrOverlongPayloadsAreRefused) {
  const std::string hello = payloadOf(encodeHello(someHello()));
  const std::string welcome = payloadOf(encodeWelcome({}));
  const std::string refusal = payloadOf(encodeRefusal({RefusalCode::kDuplicate, "why"}));
  for (size_t length = 0; length < hello.size(); ++length)
    EXPECT_FALSE(decodeHello(hello.substr(0, length)));
  for (size_t length = 0; length < welcome.size(); ++length) {
    EXPECT_FALSE(decodeWelcome(welcome.substr(0, length)));
  }
  for (size_t length = 0; length < refusal.size(); ++length) {
    EXPECT_FALSE(decodeRefusal(refusal.substr(0, length)));
  }
  EXPECT_FALSE(decodeHello(hello + "x"));
  EXPECT_FALSE(decodeWelcome(welcome + "x"));
  EXPECT_FALSE(decodeRefusal(refusal + "x"));
}

TEST(Handshake, HelloWithANegativeRankIsRefused) {
  Hello hello = someHello();
  hello.rank = -1;
  EXPECT_FALSE(decodeHello(payloadOf(encodeHello(hello))));
}

TEST(Handshake, RefusalIsShortenedAndMadePrintable) {
  const auto read = decodeRefusal(
      payloadOf(encodeRefusal({RefusalCode::kWrongSecret, "\x1b[31m" + std::string(999, 'x')})));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->code, RefusalCode::kWrongSecret);
  EXPECT_EQ(read->reason.size(), 200U);
  EXPECT_EQ(read->reason.substr(0, 5), "?[31m");
}

TEST(Handshake, RandomBytesNeverCrashADecoder) {
  std::mt19937 random(7);
  for (int round = 0; round < 5000; ++round) {
    std::string bytes(random() % 128, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    decodeHello(bytes);
    decodeWelcome(bytes);
    decodeRefusal(bytes);
    FrameBytes header{};
    std::copy_n(bytes.begin(), std::min(bytes.size(), header.size()), header.begin());
    EXPECT_FALSE(decodeHeader(header, nullptr));
  }
}

struct Pair {
  UniqueFd near;
  UniqueFd far;
  Pair() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()), 0);
    near = UniqueFd(ends[0]);
    far = UniqueFd(ends[1]);
  }
};

TEST(FrameInbox, AssemblesAFrameThatComesByteByByteAndReadsNoFurther) {
  const Pair pair;
  FrameInbox inbox({FrameType::kHello});
  const std::string frame = encodeHello(someHello());
  for (size_t i = 0; i + 1 < frame.size(); ++i) {
    ASSERT_TRUE(sendWhole(pair.far.get(), frame.substr(i, 1)));
    ASSERT_EQ(inbox.readFrom(pair.near.get()), FrameInbox::State::kMore);
  }
  ASSERT_TRUE(sendWhole(pair.far.get(), frame.substr(frame.size() - 1) + "next"));
  ASSERT_EQ(inbox.readFrom(pair.near.get()), FrameInbox::State::kWhole);
  EXPECT_EQ(inbox.payload(), payloadOf(frame));
  std::array<char, 8> rest{};
  EXPECT_EQ(::recv(pair.near.get(), rest.data(), rest.size(), 0), 4);
}

TEST(FrameInbox, RefusesOverlongUnexpectedAndForeignFrames) {
  const auto judge = [](const FrameBytes& bytes) {
    const Pair pair;
    FrameInbox inbox({FrameType::kHello});
    sendWhole(pair.far.get(), std::string(bytes.begin(), bytes.end()));
    return inbox.readFrom(pair.near.get());
  };
  EXPECT_EQ(judge(headerBytes(FrameType::kHello, ~0ULL)), FrameInbox::State::kBad);
  EXPECT_EQ(judge(headerBytes(FrameType::kData, 8)), FrameInbox::State::kBad);
  FrameBytes foreign = headerBytes(FrameType::kHello);
  foreign[4] = kWireVersion + 1;
  EXPECT_EQ(judge(foreign), FrameInbox::State::kWrongVersion);
  foreign[0] = 0;
  EXPECT_EQ(judge(foreign), FrameInbox::State::kBad);
}

TEST(FrameInbox, TellsAClosedConnection) {
  Pair pair;
  pair.far.reset();
  FrameInbox inbox({FrameType::kHello});
  EXPECT_EQ(inbox.readFrom(pair.near.get()), FrameInbox::State::kClosed);
  EXPECT_FALSE(sendWhole(pair.near.get(), "x"));
}

}  // namespace
}  // namespace torchft_ext
