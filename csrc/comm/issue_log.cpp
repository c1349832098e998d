#include "comm/issue_log.h"

namespace torchft_ext {
namespace {

constexpr auto kStore = std::memory_order_release;
constexpr auto kLoad = std::memory_order_acquire;
// The writer needs some nanoseconds; one that is interrupted there leaves its reader without.
constexpr int kTries = 100;

}  // namespace

void IssueLog::Slot::write(const IssuedOperation& operation) {
  const uint64_t version = version_.load(std::memory_order_relaxed);
  version_.store(version + 1, kStore);
  what_.store(static_cast<uint64_t>(operation.kind) << 32U | static_cast<uint32_t>(operation.root),
              kStore);
  seq_.store(operation.seq, kStore);
  at_.store(operation.at.time_since_epoch().count(), kStore);
  version_.store(version + 2, kStore);
}

std::optional<IssuedOperation> IssueLog::Slot::read() const {
  for (int i = 0; i < kTries; ++i) {
    const uint64_t version = version_.load(kLoad);
    if (version == 0) return std::nullopt;
    const uint64_t what = what_.load(kLoad);
    const int64_t seq = seq_.load(kLoad);
    const int64_t at = at_.load(kLoad);
    if (version % 2 != 0 || version_.load(kLoad) != version) continue;
    return IssuedOperation{static_cast<OpKind>(what >> 32U), static_cast<int>(what & 0xFFFFFFFFU),
                           seq, Clock::time_point(Duration(at))};
  }
  return std::nullopt;
}

void IssueLog::note(const IssuedOperation& operation, bool ordered) {
  last_.write(operation);
  if (!ordered) return;
  const uint64_t place = collectives_.load(std::memory_order_relaxed);
  ordered_[place % kKept].write(operation);
  collectives_.store(place + 1, kStore);
}

std::optional<IssuedOperation> IssueLog::collective(uint64_t place) const {
  const auto kept = [&] {
    const uint64_t issued = collectives();
    return place < issued && issued - place < kKept;  // the oldest may be written over just now
  };
  if (!kept()) return std::nullopt;
  const auto found = ordered_[place % kKept].read();
  return kept() ? found : std::nullopt;
}

}  // namespace torchft_ext
