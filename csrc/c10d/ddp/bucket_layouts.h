// Which tensors of a group are buckets of DistributedDataParallel, and how gradients lie in them.
//
// Two ranks whose buckets lie differently would add up gradients of different parameters without
// noticing. So each operation on a bucket carries a digest of its layout, which the members
// compare, and the generation that its reducer was made for: in another one it fails.
//
// Owner of BucketLayouts: the backend. Threads: any. Never blocks. Holds no tensor's memory: of a
// buffer only what keeps its address from being used again.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/mutex.h"

namespace torchft_ext {

struct BucketTag {
  uint64_t layout =
      0;  // of which parameter lies where, with which sizes and strides; see Operation
  int64_t generation = -1;
};

class BucketLayouts {
 public:
  struct Buffer {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    BucketTag tag;
  };

  // In the place of what this reducer had. Buffers of others that are gone are forgotten.
  void set(const void* reducer, std::vector<Buffer> buffers);
  // Of the bucket that is this very tensor; none of a view into it, such as a gradient.
  std::optional<BucketTag> of(const at::Tensor& tensor) const;

 private:
  struct Entry {
    const void* reducer;
    Buffer buffer;
  };

  std::atomic<bool> any_{false};  // written under mutex_
  mutable Mutex mutex_;
  std::vector<Entry> entries_ GUARDED_BY(mutex_);
};

// While it lives, what its thread issues in the owner's group belongs to this bucket, on whatever
// tensors: a communication hook is at work. In other groups it means nothing: they may have members
// whose buckets lie otherwise. The innermost counts.
class BucketScope {
 public:
  BucketScope(const BucketLayouts& owner, BucketTag tag);
  ~BucketScope();
  BucketScope(const BucketScope&) = delete;
  BucketScope& operator=(const BucketScope&) = delete;

  // Null: none on this thread.
  static const BucketScope* current();
  const BucketTag& tag() const { return tag_; }
  bool isOf(const BucketLayouts& owner) const { return &owner_ == &owner; }

 private:
  const BucketLayouts& owner_;
  const BucketTag tag_;
  const BucketScope* const around_;
};

}  // namespace torchft_ext
