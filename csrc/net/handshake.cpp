#include "net/handshake.h"

#include <algorithm>
#include <cctype>

#include "base/text.h"
#include "net/frame.h"

namespace torchft_ext {
namespace {

constexpr size_t kLongestReason = 200;

std::string wholeFrame(FrameType type, const std::string& payload) {
  FrameHeader header;
  header.type = type;
  header.length = payload.size();
  const FrameBytes bytes = encodeHeader(header);
  std::string frame(bytes.begin(), bytes.end());
  frame += payload;
  return frame;
}

}  // namespace

std::string encodeHello(const Hello& hello) {
  ByteWriter out;
  out.raw(hello.nonce.bytes);
  out.raw(hello.proof.bytes);
  out.raw(hello.from.bytes);
  out.raw(hello.to.bytes);
  out.u32(static_cast<uint32_t>(hello.rank));
  out.u8(hello.channel);
  return wholeFrame(FrameType::kHello, out.take());
}

std::optional<Hello> decodeHello(std::string_view payload) {
  ByteReader in(payload);
  Hello hello;
  in.raw(hello.nonce.bytes);
  in.raw(hello.proof.bytes);
  in.raw(hello.from.bytes);
  in.raw(hello.to.bytes);
  hello.rank = static_cast<int32_t>(in.u32());
  hello.channel = in.u8();
  if (!in.atEnd() || hello.rank < 0) return std::nullopt;
  return hello;
}

std::string encodeWelcome(const Welcome& welcome) {
  ByteWriter out;
  out.raw(welcome.proof.bytes);
  out.raw(welcome.from.bytes);
  return wholeFrame(FrameType::kWelcome, out.take());
}

std::optional<Welcome> decodeWelcome(std::string_view payload) {
  ByteReader in(payload);
  Welcome welcome;
  in.raw(welcome.proof.bytes);
  in.raw(welcome.from.bytes);
  return in.atEnd() ? std::optional<Welcome>(welcome) : std::nullopt;
}

std::string encodeRefusal(const Refusal& refusal) {
  ByteWriter out;
  out.u8(static_cast<uint8_t>(refusal.code));
  out.text(cutText(refusal.reason, kLongestReason));
  return wholeFrame(FrameType::kRefused, out.take());
}

std::optional<Refusal> decodeRefusal(std::string_view payload) {
  ByteReader in(payload);
  const uint8_t code = in.u8();
  Refusal refusal{static_cast<RefusalCode>(code), in.text(kLongestReason)};
  const bool known = code >= static_cast<uint8_t>(RefusalCode::kUnknownGeneration) &&
                     code <= static_cast<uint8_t>(RefusalCode::kWrongVersion);
  if (!in.atEnd() || !known) return std::nullopt;
  // It came from a stranger and goes into logs and error messages.
  std::replace_if(
      refusal.reason.begin(), refusal.reason.end(),
      [](unsigned char letter) { return std::isprint(letter) == 0; }, '?');
  return refusal;
}

}  // namespace torchft_ext
