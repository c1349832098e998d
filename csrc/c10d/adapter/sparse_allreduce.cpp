#include "c10d/adapter/sparse_allreduce.h"

#include <ATen/SparseTensorImpl.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "host/turn.h"

namespace torchft_ext {
namespace {

// Of a thread that waits: what it makes for the operation is not made in its modes.
struct WithoutModes {
  const c10::InferenceMode no_inference_mode{false};
  const c10::impl::ExcludeDispatchKeyGuard no_python{c10::python_ks};
};

// A header: rows, sparse dimensions, dense dimensions, and the sizes of all.
constexpr size_t kMostDimensions = 16;
constexpr size_t kRows = 0;
constexpr size_t kSparseDimensions = 1;
constexpr size_t kDenseDimensions = 2;
constexpr size_t kSizes = 3;
constexpr size_t kHeaderItems = kSizes + kMostDimensions;

// Without the dispatcher, which may call Python.
at::SparseTensorImpl& implOf(const at::Tensor& tensor) {
  return *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

}  // namespace

void checkSparse(const Argument& argument, const at::Tensor& tensor,
                 const c10d::ReduceOp& reduce_op) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.device().is_cpu(), argument.text(),
                              ": expected a sparse tensor on the CPU, found one on ",
                              tensor.device());
  TORCH_CHECK_NOT_IMPLEMENTED(
      dynamic_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl()) != nullptr, argument.text(),
      ": expected a sparse tensor of torch's own, found one of another class");
  TORCH_CHECK_NOT_IMPLEMENTED(reduce_op.op_ == c10d::ReduceOp::SUM, argument.text(),
                              ": unsupported reduction operation for a sparse tensor: expected "
                              "ReduceOp SUM, found ReduceOp number ",
                              static_cast<int>(reduce_op.op_));
  TORCH_CHECK_VALUE(static_cast<size_t>(tensor.dim()) <= kMostDimensions, argument.text(),
                    ": expected a sparse tensor of at most ", kMostDimensions,
                    " dimensions, found ", tensor.dim());
  TORCH_CHECK_VALUE(implOf(tensor).allow_tensor_metadata_change(), argument.text(),
                    ": expected a sparse tensor whose indices and values may be replaced, since "
                    "the result is written to it, found one whose metadata must not change");
}

SparseAllreduce::SparseAllreduce(const at::Tensor& tensor, DType dtype, int rank, int size,
                                 Release release)
    : target_(tensor),
      dtype_(dtype),
      rank_(rank),
      size_(size),
      release_(release),
      headers_(kHeaderItems * static_cast<size_t>(size)) {
  const at::NoGradGuard without_autograd;
  source_ = implOf(target_).indices();
  const at::Tensor coalesced = target_.coalesce();  // itself, if it is
  indices_ = implOf(coalesced).indices().contiguous();
  values_ = implOf(coalesced).values().contiguous();
}

SparseAllreduce::~SparseAllreduce() {
  release_({std::move(source_), std::move(indices_), std::move(values_)});
}

int64_t* SparseAllreduce::header(int rank) {
  return headers_.data() + static_cast<size_t>(rank) * kHeaderItems;
}

size_t SparseAllreduce::rowsOf(int rank) {
  return static_cast<size_t>(header(rank)[kRows]);
}

size_t SparseAllreduce::rowBytes() const {
  auto bytes = static_cast<size_t>(values_.element_size());
  for (int64_t dim = 1; dim < values_.dim(); ++dim) bytes *= static_cast<size_t>(values_.size(dim));
  return bytes;
}

void SparseAllreduce::layOut(Operation& operation) {
  const auto of = [this](int rank) {
    return Buffer{reinterpret_cast<uint8_t*>(header(rank)), kHeaderItems * sizeof(int64_t)};
  };
  operation.inputs = {of(rank_)};
  operation.outputs.clear();
  for (int rank = 0; rank < size_; ++rank) operation.outputs.push_back(of(rank));
}

void SparseAllreduce::begin() {
  const WithoutModes modes;
  // An operation before this one has given the tensor its result.
  if (!implOf(target_).indices().is_same(source_) && implOf(target_).coalesced()) {
    release_({std::move(source_), std::move(indices_), std::move(values_)});
    source_ = implOf(target_).indices();
    indices_ = source_.contiguous();
    values_ = implOf(target_).values().contiguous();
  }
  int64_t* const own = header(rank_);
  own[kRows] = values_.size(0);
  own[kSparseDimensions] = target_.sparse_dim();
  own[kDenseDimensions] = target_.dense_dim();
  std::copy(target_.sizes().begin(), target_.sizes().end(), own + kSizes);
}

Exchanges::Next SparseAllreduce::next(Operation& operation) {
  const WithoutModes modes;
  switch (stage_) {
    case Stage::kHeaders:
      if (auto refusal = mismatch()) return *refusal;
      gather(operation, indices_, &all_indices_);
      stage_ = Stage::kIndices;
      return {Next::Kind::kExchange, -1, {}};
    case Stage::kIndices:
      gather(operation, values_, &all_values_);
      stage_ = Stage::kValues;
      return {Next::Kind::kExchange, -1, {}};
    case Stage::kValues:
      merge_.emplace(merge());
      stage_ = Stage::kCounting;
      break;
    case Stage::kCounting:
    case Stage::kSumming:
      break;
  }
  return compute();
}

std::string SparseAllreduce::describe(int rank) {
  const int64_t* const of = header(rank);
  const int64_t sparse = of[kSparseDimensions];
  const int64_t dense = of[kDenseDimensions];
  const auto dims = std::clamp<int64_t>(sparse + dense, 0, kMostDimensions);
  return c10::str("sparse tensor of sizes ", at::IntArrayRef(of + kSizes, of + kSizes + dims), " (",
                  sparse, " sparse and ", dense, " dense dimensions)");
}

std::optional<Exchanges::Next> SparseAllreduce::mismatch() {
  const int64_t* const own = header(rank_);
  for (int rank = 0; rank < size_; ++rank) {
    const int64_t* const other = header(rank);
    if (std::equal(own + kSparseDimensions, own + kHeaderItems, other + kSparseDimensions))
      continue;
    return Next{Next::Kind::kMismatch, rank,
                "it gave a " + describe(rank) + ", where rank " + std::to_string(rank_) +
                    " gave a " + describe(rank_) + ": sparse dimensions do not match"};
  }
  return std::nullopt;
}

// The buffers of the exchange in which everyone gets these of all.
void SparseAllreduce::gather(Operation& operation, const at::Tensor& own,
                             std::vector<at::Tensor>* from_all) {
  const bool rows_last = &own == &indices_;  // else first
  operation.inputs = {readable(own)};
  operation.outputs.clear();
  for (int rank = 0; rank < size_; ++rank) {
    std::vector<int64_t> sizes = own.sizes().vec();
    (rows_last ? sizes.back() : sizes.front()) = header(rank)[kRows];
    from_all->push_back(rank == rank_ ? own : at::empty(sizes, own.options()));
    operation.outputs.push_back(rank == rank_ ? readable(own) : writable(from_all->back()));
  }
}

SparseMerge SparseAllreduce::merge() {
  std::vector<SparsePart> parts;
  parts.reserve(all_indices_.size());
  for (size_t rank = 0; rank < all_indices_.size(); ++rank) {
    parts.push_back({static_cast<const int64_t*>(all_indices_[rank].const_data_ptr()),
                     static_cast<const uint8_t*>(all_values_[rank].const_data_ptr()),
                     rowsOf(static_cast<int>(rank))});
  }
  const at::IntArrayRef sizes = target_.sizes().slice(0, static_cast<size_t>(target_.sparse_dim()));
  return {std::move(parts), sizes.vec(), rowBytes(), dtype_};
}

Exchanges::Next SparseAllreduce::compute() {
  const Next later{Next::Kind::kLater, -1, {}};
  size_t budget = kLocalBytesPerTurn;
  if (stage_ == Stage::kCounting) {
    if (!merge_->number(&budget)) return later;
    if (merge_->unordered() >= 0) {
      return {Next::Kind::kMismatch, merge_->unordered(),
              "it gave a sparse tensor that is marked as coalesced, whose indices are not in "
              "ascending order"};
    }
    std::vector<int64_t> sizes = values_.sizes().vec();
    sizes.front() = static_cast<int64_t>(merge_->rows());
    sum_indices_ = at::empty({indices_.size(0), sizes.front()}, indices_.options());
    sum_values_ = at::empty(sizes, values_.options());
    stage_ = Stage::kSumming;
  }
  auto* const indices = static_cast<int64_t*>(sum_indices_.mutable_data_ptr());
  if (!merge_->sum(indices, writable(sum_values_).data, &budget)) return later;
  tellResult();
  return {Next::Kind::kDone, -1, {}};
}

void SparseAllreduce::tellResult() {
  at::SparseTensorImpl& impl = implOf(target_);
  std::vector<at::Tensor> before{impl.indices(), impl.values()};
  impl.set_indices_and_values_unsafe(sum_indices_, sum_values_);
  impl.set_coalesced(true);
  release_(std::move(before));
}

}  // namespace torchft_ext
