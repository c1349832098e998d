#include "host/issue_report.h"

#include <algorithm>

#include "net/frame.h"

namespace torchft_ext {
namespace {

using Issued = IssueReport::Issued;

// In place of a kind: there is no operation.
constexpr uint8_t kNone = 0xFF;
constexpr auto kLastKind = OpKind::kSparseAllreduce;

std::optional<Issued> withAge(const std::optional<OperationRecord>& operation,
                              Clock::time_point now) {
  if (!operation) return std::nullopt;
  return Issued{operation->kind, operation->root, operation->seq,
                std::max<Duration>(now - operation->issued, Duration::zero())};
}

void write(const std::optional<Issued>& issued, ByteWriter& out) {
  const Issued operation = issued.value_or(Issued{});
  out.u8(issued ? static_cast<uint8_t>(operation.kind) : kNone);
  out.u32(static_cast<uint32_t>(operation.root));
  out.i64(operation.seq);
  out.i64(std::chrono::duration_cast<milliseconds>(operation.age).count());
}

std::optional<Issued> read(ByteReader& in) {
  const uint8_t kind = in.u8();
  Issued operation;
  operation.root = static_cast<int>(in.u32());
  operation.seq = in.i64();
  operation.age = durationOf(milliseconds(in.i64()));
  const bool known = kind <= static_cast<uint8_t>(kLastKind);
  if (!known && kind != kNone) in.fail();
  if (!known) return std::nullopt;
  operation.kind = static_cast<OpKind>(kind);
  return operation;
}

}  // namespace

IssueReport reportOf(const OperationRecorder& recorder, int64_t generation, uint64_t place) {
  const auto now = Clock::now();
  const OperationRecorder::Issued issued = recorder.issuedIn(generation, place);
  IssueReport report;
  report.place = place;
  report.collectives = issued.collectives;
  report.asked = withAge(issued.at_place, now);
  report.last = withAge(issued.last, now);
  report.main_thread = mainThreadNow();
  return report;
}

std::string encode(const IssueReport& report) {
  ByteWriter out;
  out.u64(report.collectives);
  out.u64(report.place);
  write(report.asked, out);
  write(report.last, out);
  out.i64(std::chrono::duration_cast<milliseconds>(report.main_thread.for_at_least).count());
  out.u8(static_cast<uint8_t>(report.main_thread.state));
  return out.take();
}

std::optional<IssueReport> decodeReport(std::string_view payload) {
  ByteReader in(payload);
  IssueReport report;
  report.collectives = in.u64();
  report.place = in.u64();
  report.asked = read(in);
  report.last = read(in);
  report.main_thread.for_at_least = durationOf(milliseconds(in.i64()));
  const uint8_t main_thread = in.u8();
  if (!in.atEnd() || main_thread > static_cast<uint8_t>(kLastMainThread)) return std::nullopt;
  report.main_thread.state = static_cast<MainThread>(main_thread);
  return report;
}

}  // namespace torchft_ext
