#include "membership/records.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/text.h"
#include "net/failure_frame.h"
#include "net/frame.h"

namespace torchft_ext {
namespace {

constexpr uint8_t kRecordVersion = 4;
constexpr uint8_t kFailureRecord = 0x81;  // in the place of a record's version
constexpr size_t kMostAddresses = 16;
constexpr size_t kLongestAddress = 96;
constexpr size_t kLongestHost = 255;
constexpr size_t kLongestPurpose = 512;
constexpr size_t kLongestRecord = 4096;
constexpr size_t kLongestFailure = 1024;
constexpr size_t kMostMeant = 1024;
constexpr size_t kLongestFailureRecord = 6000 + kMostMeant * sizeof(Token);
constexpr size_t kLongestGo = size_t{1} << 20;

void writeAddresses(ByteWriter& writer, const std::vector<SocketAddress>& addresses) {
  const size_t count = std::min(addresses.size(), kMostAddresses);
  writer.u8(static_cast<uint8_t>(count));
  for (size_t i = 0; i < count; ++i) writer.text(addresses[i].toString());
}

bool readAddresses(ByteReader& reader, std::vector<SocketAddress>& addresses) {
  const size_t count = reader.u8();
  if (!reader.ok() || count > kMostAddresses) return false;
  for (size_t i = 0; i < count; ++i) {
    const auto address = SocketAddress::parse(reader.text(kLongestAddress));
    if (!reader.ok() || !address) return false;
    addresses.push_back(*address);
  }
  return true;
}

}  // namespace

std::string encodeRecord(const MemberRecord& record) {
  ByteWriter writer;
  writer.u8(kRecordVersion);
  writer.raw(record.incarnation.bytes);
  writer.raw(record.token.bytes);
  writer.text(cutText(record.host, kLongestHost));
  writer.i64(record.pid);
  writeAddresses(writer, record.addresses);
  writeAddresses(writer, record.liveness_addresses);
  writer.u8(record.shares_memory ? 1 : 0);
  writer.text(cutText(record.purpose, kLongestPurpose));
  return writer.take();
}

std::optional<MemberRecord> decodeRecord(std::string_view bytes) {
  if (bytes.size() > kLongestRecord) return std::nullopt;
  ByteReader reader(bytes);
  if (reader.u8() != kRecordVersion) return std::nullopt;
  MemberRecord record;
  reader.raw(record.incarnation.bytes);
  reader.raw(record.token.bytes);
  record.host = reader.text(kLongestHost);
  record.pid = reader.i64();
  if (!readAddresses(reader, record.addresses)) return std::nullopt;
  if (!readAddresses(reader, record.liveness_addresses)) return std::nullopt;
  const uint8_t shares_memory = reader.u8();
  if (shares_memory > 1) reader.fail();
  record.shares_memory = shares_memory == 1;
  record.purpose = reader.text(kLongestPurpose);
  if (!reader.atEnd()) return std::nullopt;
  return record;
}

std::string encodeFailureRecord(const FailureRecord& failure_record) {
  ByteWriter writer;
  writer.u8(kFailureRecord);
  writer.text(encodeRecord(failure_record.member));
  writer.text(encodeFailure(failure_record.ending.failure));
  writer.raw(failure_record.ending.origin.bytes);
  writer.raw(failure_record.ending.culprit.bytes);
  const size_t count = std::min(failure_record.meant_for.size(), kMostMeant);
  writer.u32(static_cast<uint32_t>(count));
  for (size_t i = 0; i < count; ++i) writer.raw(failure_record.meant_for[i].bytes);
  return writer.take();
}

std::optional<FailureRecord> decodeFailureRecord(std::string_view bytes) {
  if (bytes.size() > kLongestFailureRecord) return std::nullopt;
  ByteReader reader(bytes);
  if (reader.u8() != kFailureRecord) return std::nullopt;
  auto member = decodeRecord(reader.text(kLongestRecord));
  auto failure = decodeFailure(reader.text(kLongestFailure), std::numeric_limits<int>::max());
  FailureRecord failure_record;
  reader.raw(failure_record.ending.origin.bytes);
  reader.raw(failure_record.ending.culprit.bytes);
  const uint32_t count = reader.u32();
  if (!reader.ok() || count > kMostMeant) return std::nullopt;
  failure_record.meant_for.resize(count);
  for (Token& token : failure_record.meant_for) reader.raw(token.bytes);
  if (!reader.atEnd() || !member || !failure) return std::nullopt;
  failure_record.member = std::move(*member);
  failure_record.ending.failure = std::move(*failure);
  return failure_record;
}

std::string encodeGo(const Token& token, const Roster& roster) {
  ByteWriter writer;
  writer.u8(kRecordVersion);
  writer.raw(token.bytes);
  writer.raw(roster.nonce.bytes);
  writer.raw(roster.secret.connector.bytes);
  writer.raw(roster.secret.acceptor.bytes);
  writer.u32(static_cast<uint32_t>(roster.members.size()));
  for (const MemberRecord& member : roster.members) writer.text(encodeRecord(member));
  return writer.take();
}

std::optional<Go> decodeGo(std::string_view bytes) {
  if (bytes.size() > kLongestGo) return std::nullopt;
  ByteReader reader(bytes);
  if (reader.u8() != kRecordVersion) return std::nullopt;
  Go go;
  reader.raw(go.token.bytes);
  reader.raw(go.roster.nonce.bytes);
  reader.raw(go.roster.secret.connector.bytes);
  reader.raw(go.roster.secret.acceptor.bytes);
  const uint32_t count = reader.u32();
  for (uint32_t i = 0; i < count; ++i) {
    auto member = decodeRecord(reader.text(kLongestRecord));
    if (!reader.ok() || !member) return std::nullopt;
    go.roster.members.push_back(std::move(*member));
  }
  if (!reader.atEnd()) return std::nullopt;
  return go;
}

}  // namespace torchft_ext
