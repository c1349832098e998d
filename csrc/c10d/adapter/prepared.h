// An operation whose arguments have been checked, on its way from a collective of the backend to
// its Group. Plain values.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "c10d/adapter/contiguous_copy.h"
#include "c10d/ddp/bucket_layouts.h"
#include "comm/operation.h"
#include "device/stream_side.h"

namespace torchft_ext {

struct Prepared {
  // What the operation does to a tensor.
  enum class Use { kRead, kWritten, kBoth };
  // The tensor to be used in place of a caller's: that itself, where it is contiguous.
  at::Tensor writableFor(const at::Tensor& tensor, Use use);
  std::vector<at::Tensor> writableFor(const std::vector<at::Tensor>& overwritten);
  // For an input: that itself, where it is contiguous, and apart from what is written or where the
  // engine knows it to be the same memory (in_place).
  at::Tensor readableFor(const at::Tensor& tensor, const std::vector<at::Tensor>& written,
                         const void* in_place = nullptr);
  // Which of its buffers the operation reads: see comm/operation.h.
  const std::vector<Buffer>& reads() const;

  Operation operation;
  int rank = 0;                     // this one's, in the generation that it is laid out for
  std::vector<at::Tensor> tensors;  // the callers'
  // Its own, until it is through, whoever has waited: their memory may belong to another stream
  // than the waiter's.
  std::vector<at::Tensor> kept;
  std::vector<ContiguousCopy> loads;   // before the operation
  std::vector<ContiguousCopy> stores;  // behind it
  bool async = true;                // false: device tensors are served on the current stream itself
  bool flat = false;                // the parts of its inputs or outputs are one tensor
  bool low_bit = false;             // BXOR of bools: the results are the lowest bits of a sum
  at::Tensor given;                 // of a sparse tensor: the values that this rank gives
  at::Tensor factor;                // of a PREMUL_SUM, where it is read on the device
  std::optional<BucketTag> bucket;  // that it belongs to; nullopt: found when it is issued
  std::shared_ptr<StreamSide> side;  // null: host memory, or not issued yet

 private:
  at::Tensor contiguousCopy(const at::Tensor& tensor, bool loaded, bool stored);
};

// What a Work needs beside its operations.
struct Described {
  c10d::OpType type;
  const char* title;  // a literal: "ft:all_reduce"
  std::optional<std::vector<at::Tensor>> inputs;
  std::vector<std::vector<at::Tensor>> outputs;
};

// One call of a caller's: operations, one at least, that get one Work.
struct PreparedCall {
  std::vector<Prepared> operations;
  Described described;
};

// For an engine's thread: the last reference to a tensor may need the GIL to go, which must not
// hold up the network.
void releaseElsewhere(std::vector<at::Tensor> tensors);

}  // namespace torchft_ext
