#include "c10d/compiled_numbers.h"

namespace torchft_ext {
namespace {

thread_local int aside = 0;

}  // namespace

std::atomic<int> CompiledNumbers::compiling_{0};
std::atomic<uint64_t> CompiledNumbers::forgotten_{0};

void CompiledNumbers::setCompiling(bool begins) {
  compiling_.fetch_add(begins ? 1 : -1, std::memory_order_relaxed);
}

void CompiledNumbers::setAside(bool begins) {
  aside += begins ? 1 : -1;
}

void CompiledNumbers::forgetAll() {
  ++forgotten_;
}

void CompiledNumbers::note(int Noted::*number, int answer) {
  if (aside > 0) return;
  MutexLock lock(mutex_);
  if (noted_.since != forgotten_) {
    noted_ = Noted{};
    noted_.since = forgotten_;
  }
  noted_.several |= noted_.*number != kNone && noted_.*number != answer;
  noted_.*number = answer;
}

bool CompiledNumbers::outdatedBy(int rank, int size) const {
  MutexLock lock(mutex_);
  if (noted_.since != forgotten_) return false;
  const auto differs = [](int noted, int now) { return noted != kNone && noted != now; };
  return noted_.several || differs(noted_.rank, rank) || differs(noted_.size, size);
}

}  // namespace torchft_ext
