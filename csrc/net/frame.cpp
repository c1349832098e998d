#include "net/frame.h"

#include <algorithm>
#include <limits>

namespace torchft_ext {
namespace {

template <typename Integer>
void putLittleEndian(Integer value, uint8_t* out) {
  for (size_t i = 0; i < sizeof(Integer); ++i) out[i] = static_cast<uint8_t>(value >> (8 * i));
}

template <typename Integer>
Integer getLittleEndian(const uint8_t* in) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(Integer); ++i) value |= static_cast<uint64_t>(in[i]) << (8 * i);
  return static_cast<Integer>(value);
}

template <typename Integer>
void append(Integer value, std::string* out) {
  std::array<uint8_t, sizeof(Integer)> bytes{};
  putLittleEndian(value, bytes.data());
  out->append(bytes.begin(), bytes.end());
}

template <typename Integer>
Integer parse(std::string_view bytes) {
  if (bytes.size() != sizeof(Integer)) return 0;
  return getLittleEndian<Integer>(reinterpret_cast<const uint8_t*>(bytes.data()));
}

bool isKnown(uint16_t type) {
  switch (static_cast<FrameType>(type)) {
    case FrameType::kHello:
    case FrameType::kWelcome:
    case FrameType::kRefused:
    case FrameType::kData:
    case FrameType::kAnnounce:
    case FrameType::kClear:
    case FrameType::kMessage:
    case FrameType::kBarrier:
    case FrameType::kNudge:
    case FrameType::kQuestion:
    case FrameType::kReport:
    case FrameType::kFailed:
    case FrameType::kGoodbye:
    case FrameType::kBeat:
    case FrameType::kNotice:
    case FrameType::kMember:
    case FrameType::kElastic:
    case FrameType::kCall:
    case FrameType::kAnswer:
    case FrameType::kInquiry:
    case FrameType::kJobReport:
      return true;
  }
  return false;
}

void explain(std::string* why, const std::string& text) {
  if (why != nullptr) *why = text;
}

}  // namespace

FrameBytes encodeHeader(const FrameHeader& header) {
  FrameBytes bytes{};
  putLittleEndian(kFrameMagic, &bytes[0]);
  putLittleEndian(kWireVersion, &bytes[4]);
  putLittleEndian(static_cast<uint16_t>(header.type), &bytes[6]);
  putLittleEndian(header.length, &bytes[8]);
  putLittleEndian(header.seq, &bytes[16]);
  putLittleEndian(header.tag, &bytes[24]);
  putLittleEndian(header.aux, &bytes[32]);
  return bytes;
}

std::optional<FrameHeader> decodeHeader(const FrameBytes& bytes, std::string* why) {
  const auto magic = getLittleEndian<uint32_t>(&bytes[0]);
  const auto version = getLittleEndian<uint16_t>(&bytes[4]);
  const auto type = getLittleEndian<uint16_t>(&bytes[6]);
  if (magic != kFrameMagic) {
    explain(why, "not a frame: expected magic " + std::to_string(kFrameMagic) + ", found " +
                     std::to_string(magic));
    return std::nullopt;
  }
  if (version != kWireVersion) {
    explain(why, "expected wire version " + std::to_string(kWireVersion) + ", found " +
                     std::to_string(version) + ": install the same torchft_ext on all hosts");
    return std::nullopt;
  }
  if (!isKnown(type)) {
    explain(why, "unknown frame type " + std::to_string(type));
    return std::nullopt;
  }
  return FrameHeader{static_cast<FrameType>(type), getLittleEndian<uint64_t>(&bytes[8]),
                     getLittleEndian<uint64_t>(&bytes[16]), getLittleEndian<uint64_t>(&bytes[24]),
                     getLittleEndian<uint64_t>(&bytes[32])};
}

std::optional<uint16_t> versionOf(const FrameBytes& bytes) {
  if (getLittleEndian<uint32_t>(&bytes[0]) != kFrameMagic) return std::nullopt;
  return getLittleEndian<uint16_t>(&bytes[4]);
}

uint64_t longestPayload(FrameType type) {
  switch (type) {
    case FrameType::kData:
    case FrameType::kMessage:
      return std::numeric_limits<uint64_t>::max();
    case FrameType::kHello:
      return 128;
    case FrameType::kWelcome:
      return 64;
    case FrameType::kRefused:
      return 512;
    case FrameType::kFailed:
      return 16384;
    case FrameType::kNotice:
      return 1024;
    case FrameType::kGoodbye:
    case FrameType::kBeat:
      return 64;
    case FrameType::kReport:
      return 128;
    case FrameType::kMember:
      return 8192;
    case FrameType::kElastic:
    case FrameType::kCall:
    case FrameType::kAnswer:
    case FrameType::kJobReport:
      return uint64_t{16} << 20U;
    case FrameType::kAnnounce:
      return 8;
    case FrameType::kClear:
    case FrameType::kBarrier:
    case FrameType::kNudge:
    case FrameType::kQuestion:
    case FrameType::kInquiry:
      return 0;
  }
  return 0;
}

void ByteWriter::u8(uint8_t value) {
  append(value, &out_);
}
void ByteWriter::u16(uint16_t value) {
  append(value, &out_);
}
void ByteWriter::u32(uint32_t value) {
  append(value, &out_);
}
void ByteWriter::u64(uint64_t value) {
  append(value, &out_);
}

void ByteWriter::text(std::string_view value) {
  u32(static_cast<uint32_t>(value.size()));
  out_.append(value);
}

void ByteWriter::raw(std::span<const uint8_t> bytes) {
  out_.append(bytes.begin(), bytes.end());
}

std::string_view ByteReader::takeBytes(size_t count) {
  if (!ok_ || rest_.size() < count) {
    ok_ = false;
    return {};
  }
  const std::string_view taken = rest_.substr(0, count);
  rest_.remove_prefix(count);
  return taken;
}

uint8_t ByteReader::u8() {
  return parse<uint8_t>(takeBytes(sizeof(uint8_t)));
}
uint16_t ByteReader::u16() {
  return parse<uint16_t>(takeBytes(sizeof(uint16_t)));
}
uint32_t ByteReader::u32() {
  return parse<uint32_t>(takeBytes(sizeof(uint32_t)));
}
uint64_t ByteReader::u64() {
  return parse<uint64_t>(takeBytes(sizeof(uint64_t)));
}

std::string ByteReader::text(size_t longest) {
  const uint32_t length = u32();
  if (length > longest) ok_ = false;
  return std::string(takeBytes(length));
}

void ByteReader::raw(std::span<uint8_t> into) {
  const std::string_view bytes = takeBytes(into.size());
  std::fill(std::copy(bytes.begin(), bytes.end(), into.begin()), into.end(), uint8_t{0});
}

}  // namespace torchft_ext
