#include "liveness/notice.h"

#include <limits>

#include "net/failure_frame.h"
#include "net/frame.h"

namespace torchft_ext {
namespace {

constexpr int kAnyRank = std::numeric_limits<int>::max();
constexpr size_t kHeadBytes = 1 + sizeof(Nonce);
constexpr size_t kFailureAt = kHeadBytes + sizeof(Incarnation);

bool readFailed(std::string_view payload, ByteReader& in, Notice& notice) {
  in.raw(notice.dead.bytes);
  if (!in.ok()) return false;
  std::optional<Failure> failure = decodeFailure(payload.substr(kFailureAt), kAnyRank);
  if (failure) notice.failure = std::move(*failure);
  return failure.has_value();
}

bool readLeft(ByteReader& in, Notice& notice) {
  const int64_t rank = in.i64();
  if (!in.atEnd() || rank < 0 || rank >= kAnyRank) return false;
  notice.rank = static_cast<int>(rank);
  return true;
}

bool readSought(ByteReader& in, Notice& notice) {
  in.raw(notice.sought.bytes);
  return in.atEnd();
}

bool isOfAProcess(Notice::Type type) {
  return type == Notice::Type::kSeek || type == Notice::Type::kSeen;
}

}  // namespace

std::string encodeNotice(const Notice& notice) {
  ByteWriter out;
  out.u8(static_cast<uint8_t>(notice.type));
  out.raw(notice.generation.bytes);
  if (notice.type == Notice::Type::kLeft) out.i64(notice.rank);
  if (isOfAProcess(notice.type)) out.raw(notice.sought.bytes);
  if (notice.type != Notice::Type::kFailed) return out.take();
  out.raw(notice.dead.bytes);
  return out.take() + encodeFailure(notice.failure);
}

std::optional<Notice> decodeNotice(std::string_view payload) {
  ByteReader in(payload);
  Notice notice;
  notice.type = static_cast<Notice::Type>(in.u8());
  in.raw(notice.generation.bytes);
  bool whole = false;
  switch (notice.type) {
    case Notice::Type::kFailed:
      whole = readFailed(payload, in, notice);
      break;
    case Notice::Type::kLeft:
      whole = readLeft(in, notice);
      break;
    case Notice::Type::kAsk:
      whole = in.atEnd();
      break;
    case Notice::Type::kSeek:
    case Notice::Type::kSeen:
      whole = readSought(in, notice);
      break;
  }
  return whole ? std::optional<Notice>(std::move(notice)) : std::nullopt;
}

}  // namespace torchft_ext
