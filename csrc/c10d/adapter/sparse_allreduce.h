// The sum of a sparse COO tensor over all ranks, where each rank has other rows, and another number
// of them. Host memory.
//
// Exchanges: first how many rows each rank has and of which shape, then their indices, then their
// values, straight between the tensors; the sum is computed by each rank, in the order of the
// ranks. Only then the caller's tensor gets it, all at once: its indices and values are replaced,
// as gloo does, so what the caller has taken out of it before stays as it was.
//
// What this rank gives is read when the operation's turn has come, if the tensor is coalesced by
// then, as the result of an operation before it is; else at issue, which coalesces a copy.
//
// Owner: the Operation. Threads: made by the caller's; then the engine's, or one that waits, one
// call at a time, without that thread's modes of torch. It never blocks, and never takes the GIL:
// what may need it to go is let go elsewhere.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <vector>

#include "c10d/adapter/arguments.h"
#include "comm/operation.h"
#include "host/sparse_merge.h"

namespace torchft_ext {

// A sparse COO tensor on the CPU that can be summed and written: else it raises.
void checkSparse(const Argument& argument, const at::Tensor& tensor,
                 const c10d::ReduceOp& reduce_op);

class SparseAllreduce : public Exchanges {
 public:
  // The tensor has been checked. release: for tensors whose last owner this may be; it must not
  // block.
  using Release = void (*)(std::vector<at::Tensor> tensors);
  SparseAllreduce(const at::Tensor& tensor, DType dtype, int rank, int size, Release release);
  ~SparseAllreduce() override;

  const at::Tensor& values() const { return values_; }  // what this rank gives, as it is now
  void layOut(Operation& operation);                    // for the first exchange

  void begin() override;
  Next next(Operation& operation) override;

 private:
  enum class Stage : uint8_t { kHeaders, kIndices, kValues, kCounting, kSumming };

  int64_t* header(int rank);
  size_t rowsOf(int rank);
  size_t rowBytes() const;
  std::optional<Next> mismatch();
  std::string describe(int rank);
  void gather(Operation& operation, const at::Tensor& own, std::vector<at::Tensor>* from_all);
  SparseMerge merge();
  Next compute();
  void tellResult();

  const at::Tensor target_;
  const DType dtype_;
  const int rank_;
  const int size_;
  const Release release_;
  at::Tensor source_;             // the tensor's own indices that indices_ were taken from
  at::Tensor indices_;            // contiguous, in ascending order
  at::Tensor values_;             // contiguous
  std::vector<int64_t> headers_;  // of all ranks
  std::vector<at::Tensor> all_indices_;
  std::vector<at::Tensor> all_values_;
  Stage stage_ = Stage::kHeaders;
  std::optional<SparseMerge> merge_;
  at::Tensor sum_indices_;
  at::Tensor sum_values_;
};

}  // namespace torchft_ext
