#include "c10d/ddp/bucket_layouts.h"

#include <algorithm>
#include <utility>

namespace torchft_ext {
namespace {

thread_local const BucketScope* present = nullptr;

}  // namespace

void BucketLayouts::set(const void* reducer, std::vector<Buffer> buffers) {
  std::vector<Entry> gone;  // destroyed after the lock
  MutexLock lock(mutex_);
  const auto kept =
      std::stable_partition(entries_.begin(), entries_.end(), [reducer](const Entry& each) {
        return each.reducer != reducer && !each.buffer.tensor.expired();
      });
  gone.assign(std::make_move_iterator(kept), std::make_move_iterator(entries_.end()));
  entries_.erase(kept, entries_.end());
  for (Buffer& each : buffers) entries_.push_back({reducer, std::move(each)});
  any_.store(!entries_.empty(), std::memory_order_relaxed);
}

std::optional<BucketTag> BucketLayouts::of(const at::Tensor& tensor) const {
  if (!any_.load(std::memory_order_relaxed)) return std::nullopt;
  MutexLock lock(mutex_);
  for (const Entry& each : entries_) {
    if (each.buffer.tensor._unsafe_get_target() == tensor.unsafeGetTensorImpl())
      return each.buffer.tag;
  }
  return std::nullopt;
}

BucketScope::BucketScope(const BucketLayouts& owner, BucketTag tag)
    : owner_(owner), tag_(tag), around_(present) {
  present = this;
}

BucketScope::~BucketScope() {
  present = around_;
}

const BucketScope* BucketScope::current() {
  return present;
}

}  // namespace torchft_ext
