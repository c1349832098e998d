#include "c10d/ddp/ddp_reducer.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>
#include <utility>

namespace torchft_ext {
namespace {

// Never made: names protected fields of its base.
struct Inside : c10d::Reducer {
  static auto& buckets(c10d::Reducer& of) { return of.*(&Inside::buckets_); }
  static at::Tensor& used(c10d::Reducer& of) { return of.*(&Inside::local_used_map_); }
  static const at::Tensor& usedOnDevice(c10d::Reducer& of) {
    return of.*(&Inside::local_used_map_dev_);
  }
  static const std::vector<at::Tensor>& parameters(c10d::Reducer& of) {
    return of.*(&Inside::params_);
  }
  static int& sampleRate(c10d::Reducer& of) {
    return of.*(&Inside::ddp_runtime_logging_sample_rate_);
  }
  static const c10::intrusive_ptr<c10d::ProcessGroup>& group(c10d::Reducer& of) {
    return of.*(&Inside::process_group_);
  }
  static std::mutex& mutex(c10d::Reducer& of) { return of.*(&Inside::mutex_); }
  static bool& expectsHooks(c10d::Reducer& of) { return of.*(&Inside::expect_autograd_hooks_); }
};

// Equal on all ranks for equal layouts; never 0.
class Digest {
 public:
  void add(uint64_t value) {
    for (unsigned shift = 0; shift < 64; shift += 8)
      hash_ = (hash_ ^ static_cast<uint8_t>(value >> shift)) * 1099511628211U;
  }
  uint64_t value() const { return hash_ != 0 ? hash_ : 1; }

 private:
  uint64_t hash_ = 14695981039346656037U;  // FNV-1a, 64 bits
};

template <typename Bucket>
uint64_t layoutOf(const Bucket& bucket) {
  Digest digest;
  for (size_t i = 0; i < bucket.variable_indices.size(); ++i) {
    digest.add(bucket.variable_indices[i]);
    for (const int64_t size : bucket.variables[i].sizes()) digest.add(static_cast<uint64_t>(size));
    for (int64_t axis = 0; axis < bucket.variables[i].dim(); ++axis) {
      // That of a dimension of size 1 may be anything.
      if (bucket.variables[i].size(axis) > 1)
        digest.add(static_cast<uint64_t>(bucket.variables[i].stride(axis)));
    }
    digest.add(static_cast<uint64_t>(bucket.variables[i].scalar_type()));
    digest.add(i < bucket.offsets.size() ? bucket.offsets[i] : 0);  // a sparse one has none
  }
  return digest.value();
}

BucketLayouts::Buffer bufferOf(const at::Tensor& tensor, const BucketTag& tag) {
  return {
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr()),
      tag};
}

// Runs a hook as part of its bucket.
class TaggedHook : public c10d::CommHookInterface {
 public:
  TaggedHook(std::unique_ptr<c10d::CommHookInterface> hook, c10::intrusive_ptr<FtBackend> backend,
             std::shared_ptr<const BucketTags> tags)
      : hook_(std::move(hook)), backend_(std::move(backend)), tags_(std::move(tags)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const BucketScope scope(backend_->bucketLayouts(), tags_->at(bucket.getIndex()));
    return hook_->runHook(bucket);
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return hook_->parseHookResult(result);
  }

 private:
  const std::unique_ptr<c10d::CommHookInterface> hook_;
  const c10::intrusive_ptr<FtBackend> backend_;
  const std::shared_ptr<const BucketTags> tags_;
};

// BuiltinCommHookType::FP16_COMPRESS, whose class torch does not export.
class Fp16Hook : public c10d::CommHookInterface {
 public:
  explicit Fp16Hook(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    at::Tensor compressed = bucket.getBuffer().to(at::kHalf);
    compressed /= group_->getSize();  // before the sum, which could overflow
    std::vector<at::Tensor> tensors{compressed};
    return group_->allreduce(tensors)->getFuture()->then(
        [buffer = bucket.getBuffer()](c10::ivalue::Future& reduced) {
          buffer.copy_(c10d::detail::parseCppCommHookResult(reduced.value()));
          return c10::IValue(buffer);
        },
        c10::TensorType::get());
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace

void BucketTags::set(std::vector<BucketTag> tags) {
  MutexLock lock(mutex_);
  tags_ = std::move(tags);
}

BucketTag BucketTags::at(size_t index) const {
  MutexLock lock(mutex_);
  return index < tags_.size() ? tags_[index] : BucketTag{};
}

DdpReducer::DdpReducer(c10::intrusive_ptr<FtBackend> backend,
                       const std::shared_ptr<c10d::Reducer>& reducer, int64_t generation)
    : backend_(std::move(backend)), reducer_(reducer), generation_(generation) {}

std::shared_ptr<c10d::Reducer> DdpReducer::reducer() const {
  auto reducer = reducer_.lock();
  TORCH_CHECK(reducer, "a reducer of DistributedDataParallel was used after its end");
  return reducer;
}

std::optional<std::string> DdpReducer::whyStale() const {
  const int64_t now = backend_->generation();
  if (now == generation_) return std::nullopt;
  return "its forward() ran in generation " + std::to_string(generation_) +
         " and the group is in generation " + std::to_string(now) +
         ": the other ranks would not add these gradients to theirs";
}

void DdpReducer::readLayout() {
  const auto reducer = this->reducer();
  std::vector<BucketTag> tags;
  std::vector<BucketLayouts::Buffer> buffers;
  Digest all;
  on_device_ = false;
  sparse_ = false;
  for (const auto& bucket : Inside::buckets(*reducer)) {
    tags.push_back({layoutOf(bucket), generation_});
    all.add(tags.back().layout);
    sparse_ = sparse_ || bucket.expect_sparse_gradient;
    if (!bucket.gradients.defined()) continue;  // a sparse one, before its first backward()
    on_device_ = on_device_ || !bucket.gradients.is_cpu();
    buffers.push_back(bufferOf(bucket.gradients, tags.back()));
  }
  const at::Tensor& used = Inside::usedOnDevice(*reducer);
  if (used.defined()) {
    Digest digest;
    digest.add(static_cast<uint64_t>(used.numel()));
    buffers.push_back(bufferOf(used, {digest.value(), generation_}));
  }
  layout_ = all.value();
  compared_ = false;
  tags_->set(std::move(tags));
  backend_->bucketLayouts().set(reducer.get(), std::move(buffers));
}

void DdpReducer::renewViews() {
  const auto reducer = this->reducer();
  for (auto& bucket : Inside::buckets(*reducer)) {
    if (bucket.expect_sparse_gradient || !bucket.gradients.defined()) continue;
    for (at::Tensor& view : bucket.bucket_views_in)
      view = bucket.gradients.as_strided(view.sizes(), view.strides(), view.storage_offset());
    bucket.bucket_views_out = bucket.bucket_views_in;
  }
  readLayout();
}

void DdpReducer::compareLayouts() {
  const bool untagged = on_device_ || (sparse_ && !hooked_);
  if (!untagged || compared_) return;
  Digest digest;
  digest.add(layout_);
  digest.add(hooked_ ? 1 : 0);
  backend_->compareLayouts({digest.value(), generation_});
  compared_ = true;
}

void DdpReducer::registerHook(std::unique_ptr<c10d::CommHookInterface> hook) {
  hooked_ = true;
  reducer()->register_comm_hook(std::make_unique<TaggedHook>(std::move(hook), backend_, tags_));
}

void DdpReducer::registerBuiltinHook(c10d::BuiltinCommHookType kind) {
  if (kind == c10d::BuiltinCommHookType::FP16_COMPRESS) {
    registerHook(std::make_unique<Fp16Hook>(Inside::group(*reducer())));
  } else {
    reducer()->register_builtin_comm_hook(kind);  // reduces the bucket itself, which is known
  }
}

c10::intrusive_ptr<c10::ivalue::Future> DdpReducer::runHook(c10d::GradBucket& bucket) {
  const BucketScope scope(backend_->bucketLayouts(), tags_->at(bucket.getIndex()));
  return reducer()->run_comm_hook(bucket);
}

void DdpReducer::carryOver(const DdpReducer& before, bool used) {
  const auto reducer = this->reducer();
  if (before.sample_rate_) Inside::sampleRate(*reducer) = *before.sample_rate_;
  at::Tensor& marks = Inside::used(*reducer);
  if (!used || !marks.defined() || !before.used_.defined() || before.used_.numel() != marks.numel())
    return;
  const std::vector<at::Tensor>& parameters = Inside::parameters(*reducer);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    if (parameters[i].grad().defined()) marks[at].copy_(before.used_[at]);
  }
}

void DdpReducer::retire() {
  const auto reducer = reducer_.lock();
  if (!reducer) return;
  const std::scoped_lock lock(Inside::mutex(*reducer));
  Inside::expectsHooks(*reducer) = false;
  used_ = Inside::used(*reducer);
  sample_rate_ = Inside::sampleRate(*reducer);
  for (auto& bucket : Inside::buckets(*reducer)) {
    bucket.gradients.reset();
    bucket.future_work.reset();
    for (auto* views : {&bucket.bucket_views_in, &bucket.bucket_views_out})
      std::fill(views->begin(), views->end(), at::Tensor());
  }
}

}  // namespace torchft_ext
