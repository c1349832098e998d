#include "membership/late_writes.h"

#include <utility>

namespace torchft_ext {

uint64_t LateWrites::giveUp(const Write& write) {
  const MutexLock lock(mutex_);
  late_[++last_number_] = {write.key, std::nullopt};
  return last_number_;
}

void LateWrites::note(const Write& write) {
  const MutexLock lock(mutex_);
  for (auto& [number, late] : late_) {
    if (late.key == write.key) late.since = write.value;
  }
}

std::optional<std::string> LateWrites::returned(uint64_t number) {
  const MutexLock lock(mutex_);
  const auto late = late_.extract(number);
  return late.empty() ? std::nullopt : std::move(late.mapped().since);
}

}  // namespace torchft_ext
