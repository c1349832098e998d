// Checks of what a caller hands to a collective, and its translation into buffers. Every refusal
// names operation, argument, expected and found: ValueError for wrong numbers, TypeError for wrong
// dtypes, NotImplementedError for what no engine here serves. Pure functions; any thread.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "comm/operation.h"

namespace torchft_ext {

// Names an argument in messages: "allreduce: tensors[0]".
struct Argument {
  const char* op;
  std::string name;
  std::string text() const { return std::string(op) + ": " + name; }
  Argument at(size_t index) const { return {op, name + "[" + std::to_string(index) + "]"}; }
};

void checkCount(const Argument& argument, size_t found, size_t expected);
void checkNumel(const Argument& argument, const at::Tensor& tensor, int64_t expected,
                const char* meaning);
void checkSameDtype(const Argument& argument, const at::Tensor& tensor, const Argument& other,
                    const at::Tensor& other_tensor);
void checkSize(const Argument& argument, int64_t size);  // of a group: 1 to kMostRanks
// 0 <= rank < size
void checkRank(const Argument& argument, int64_t rank, int size);

// A dense tensor of the CPU or a device that can be written: each element has memory of its own.
void checkOutput(const Argument& argument, const at::Tensor& tensor);
void checkOutputs(const Argument& argument, const std::vector<at::Tensor>& tensors,
                  size_t expected);
// A dense tensor of the CPU or a device, of any layout; a lazily conjugated or negated one is
// computed.
at::Tensor asInput(const Argument& argument, const at::Tensor& tensor);

Buffer writable(const at::Tensor& tensor);
Buffer readable(const at::Tensor& tensor);
// Cuts a contiguous tensor into `parts` equal buffers. Its size has been checked to be a multiple.
std::vector<Buffer> cut(Buffer whole, int parts);

// torch's names as ours; nullopt for what no engine has.
std::optional<DType> namedDtype(at::ScalarType type);
std::optional<ReduceKind> arithmeticKind(c10d::ReduceOp::RedOpType op);  // all but those on bits

// Its own name where the engine knows it, else bytes: for operations that only move data.
DType dtypeOfData(const at::Tensor& tensor);
// Complex numbers can be reduced as real ones.
bool sums(const c10d::ReduceOp& reduce_op);
struct CheckedReduction {
  DType dtype = DType::kFloat;
  ReduceKind kind = ReduceKind::kSum;
};
CheckedReduction reductionOf(const Argument& argument, const at::Tensor& tensor,
                             const c10d::ReduceOp& reduce_op);

// Splits of alltoall_base in rows of dimension 0, as buffers by rank. Empty splits: even.
std::vector<Buffer> splitRows(const Argument& argument, const at::Tensor& tensor, Buffer whole,
                              const std::vector<int64_t>& splits, int size);

}  // namespace torchft_ext
