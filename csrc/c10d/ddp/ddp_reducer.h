// One reducer of DistributedDataParallel, watched by the backend of its group: the layout of its
// buckets, its hook, and its end.
//
// Owner: the DDP object, in C++, or Python, beside it. Threads: the one that runs forward(); what
// the hook needs is shared with backward()'s. Does not keep the reducer alive. Blocks in retire()
// alone. After the generation: what the reducer still issues fails (see bucket_layouts.h).
//
// It reads fields of c10d::Reducer that are protected, of which no getter tells: where a parameter
// lies in a bucket, and which parameters a pass without synchronisation used.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <vector>

#include "c10d/ddp/bucket_layouts.h"
#include "c10d/group/ft_backend.h"

namespace torchft_ext {

// The tags of a reducer's buckets, by index.
class BucketTags {
 public:
  void set(std::vector<BucketTag> tags);
  // Of no layout, before the buckets have been read.
  BucketTag at(size_t index) const;

 private:
  mutable Mutex mutex_;
  std::vector<BucketTag> tags_ GUARDED_BY(mutex_);
};

class DdpReducer {
 public:
  // generation: the one that the reducer is for.
  DdpReducer(c10::intrusive_ptr<FtBackend> backend, const std::shared_ptr<c10d::Reducer>& reducer,
             int64_t generation);

  int64_t generation() const { return generation_; }
  // The group is in another generation: one clause that says why no backward() may go on, whose
  // forward() ran in this reducer's. nullopt: it is in this one.
  std::optional<std::string> whyStale() const;
  // To be called when the buckets have been made, or made anew.
  void readLayout();
  // To be called when the reducer was told the dtype of mixed precision: it converts its buckets,
  // but not the views through which gradients come and go (torch 2.13, Reducer::
  // set_mixed_precision_param_dtype()). With those of the old buckets, the sum of what no gradient
  // was written to becomes the gradients of its first step.
  void renewViews();
  // Blocks until all members have called it: MismatchError where one has another layout. For
  // buckets whose operations do not carry their tag: on a device, and of sparse gradients, which
  // have another tensor in each backward(), where no hook is registered. With none of these it
  // does nothing, and nothing the second time after readLayout().
  void compareLayouts();

  // As Reducer's own; what they issue carries the bucket's tag.
  void registerHook(std::unique_ptr<c10d::CommHookInterface> hook);
  void registerBuiltinHook(c10d::BuiltinCommHookType kind);
  // Reducer's run_comm_hook(), likewise.
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket);

  // Takes over what no constructor is given: how often statistics are taken and, with used, which
  // parameters that have a gradient were used in passes without synchronisation.
  void carryOver(const DdpReducer& before, bool used);
  // Takes no further part in a backward(), and lets go of its buckets' memory. Blocks while a
  // backward() is inside it: until its operations are over. Its autograd hooks stay, and do
  // nothing: a thread of the autograd engine may still run them after a backward() has raised.
  void retire();

 private:
  std::shared_ptr<c10d::Reducer> reducer() const;

  const c10::intrusive_ptr<FtBackend> backend_;
  const std::weak_ptr<c10d::Reducer> reducer_;
  const int64_t generation_;
  const std::shared_ptr<BucketTags> tags_ = std::make_shared<BucketTags>();
  uint64_t layout_ = 0;  // of all buckets
  bool on_device_ = false;
  bool sparse_ = false;
  bool hooked_ = false;
  bool compared_ = false;
  // Kept by retire().
  at::Tensor used_;
  std::optional<int> sample_rate_;
};

}  // namespace torchft_ext
