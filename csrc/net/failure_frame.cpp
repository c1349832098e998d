#include "net/failure_frame.h"

#include "base/text.h"
#include "net/frame.h"

namespace torchft_ext {
namespace {

constexpr size_t kLongestHost = 255;
constexpr size_t kLongestHow = 500;

}  // namespace

std::string encodeFailure(const Failure& failure) {
  ByteWriter out;
  out.u8(static_cast<uint8_t>(failure.kind));
  out.i64(failure.cause.rank);
  out.i64(failure.cause.other_rank);
  out.i64(failure.cause.pid);
  out.text(cutText(failure.cause.host, kLongestHost));
  out.text(cutText(failure.cause.how, kLongestHow));
  return out.take();
}

std::optional<Failure> decodeFailure(std::string_view payload, int size) {
  ByteReader in(payload);
  const uint8_t kind = in.u8();
  Failure failure;
  const int64_t rank = in.i64();
  const int64_t other_rank = in.i64();
  failure.cause.pid = in.i64();
  failure.cause.host = in.text(kLongestHost);
  failure.cause.how = in.text(kLongestHow);
  const bool known_kind = kind >= static_cast<uint8_t>(FailureKind::kPeerLost) &&
                          kind <= static_cast<uint8_t>(FailureKind::kInternal);
  if (!in.atEnd() || !known_kind) return std::nullopt;
  if (rank < -1 || rank >= size || other_rank < -1 || other_rank >= size) return std::nullopt;
  failure.kind = static_cast<FailureKind>(kind);
  failure.cause.rank = static_cast<int>(rank);
  failure.cause.other_rank = static_cast<int>(other_rank);
  return failure;
}

}  // namespace torchft_ext
