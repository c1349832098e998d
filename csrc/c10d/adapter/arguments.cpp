#include "c10d/adapter/arguments.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "comm/group.h"

namespace torchft_ext {
namespace {

// What the CPU engine computes with.
std::optional<DType> knownDtype(at::ScalarType type) {
  const std::optional<DType> dtype = namedDtype(type);
  if (dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2) return std::nullopt;
  return dtype;
}

void checkTensor(const Argument& argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), argument.text(),
                    ": expected a tensor, found an undefined one");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, argument.text(),
                    ": expected a dense tensor, found layout ", tensor.layout());
  // Which of them this group serves is Devices' to say.
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu() || tensor.is_cuda() || tensor.is_privateuseone(), argument.text(),
      ": expected a tensor on the CPU or an accelerator, found one on ", tensor.device());
}

// ReduceOps that work on bits; nullopt for all others.
std::optional<ReduceKind> bitwiseKindOf(const c10d::ReduceOp& reduce_op) {
  switch (reduce_op.op_) {
    case c10d::ReduceOp::BAND:
      return ReduceKind::kBand;
    case c10d::ReduceOp::BOR:
      return ReduceKind::kBor;
    case c10d::ReduceOp::BXOR:
      return ReduceKind::kBxor;
    default:
      return std::nullopt;
  }
}

ReduceKind kindOf(const Argument& argument, const c10d::ReduceOp& reduce_op, bool is_bool) {
  const std::optional<ReduceKind> kind = arithmeticKind(reduce_op.op_);
  TORCH_CHECK_VALUE(kind.has_value(), argument.op,
                    ": op: expected ReduceOp SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM, BAND, BOR or "
                    "BXOR, found ReduceOp number ",
                    static_cast<int>(reduce_op.op_));
  TORCH_CHECK_TYPE(kind != ReduceKind::kAvg || !is_bool, argument.text(),
                   ": ReduceOp.AVG: expected a number type, found bool");
  return *kind;
}

// Sorted by stride, each dimension's steps are longer than all smaller ones together. Enough, and
// true of every slice and permutation.
bool elementsAreApart(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, steps
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0) return true;
    if (tensor.size(dim) > 1) dims.emplace_back(tensor.stride(dim), tensor.size(dim) - 1);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, steps] : dims) {
    if (stride <= reach) return false;
    reach += stride * steps;
  }
  return true;
}

}  // namespace

std::optional<DType> namedDtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat;
    case at::kDouble:
      return DType::kDouble;
    case at::kHalf:
      return DType::kHalf;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kByte:
      return DType::kUint8;
    case at::kBool:
      return DType::kBool;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4M3;
    case at::kFloat8_e5m2:
      return DType::kFloat8E5M2;
    default:
      return std::nullopt;
  }
}

std::optional<ReduceKind> arithmeticKind(c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return ReduceKind::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceKind::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceKind::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceKind::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceKind::kMax;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceKind::kPreMulSum;
    default:
      return std::nullopt;
  }
}

void checkCount(const Argument& argument, size_t found, size_t expected) {
  TORCH_CHECK_VALUE(found == expected, argument.text(), ": expected a list of ", expected,
                    expected == 1 ? " tensor, found " : " tensors, found ", found);
}

void checkNumel(const Argument& argument, const at::Tensor& tensor, int64_t expected,
                const char* meaning) {
  TORCH_CHECK_VALUE(tensor.numel() == expected, argument.text(), ": expected ", expected,
                    " elements (", meaning, "), found ", tensor.numel());
}

void checkSameDtype(const Argument& argument, const at::Tensor& tensor, const Argument& other,
                    const at::Tensor& other_tensor) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == other_tensor.scalar_type(), argument.text(),
                   ": expected dtype ", other_tensor.scalar_type(), " as ", other.name,
                   " has, found ", tensor.scalar_type());
}

void checkSize(const Argument& argument, int64_t size) {
  TORCH_CHECK_VALUE(size >= 1, argument.text(), ": expected at least 1, found ", size);
  TORCH_CHECK_VALUE(size <= kMostRanks, argument.text(), ": expected at most ", kMostRanks,
                    ", found ", size);
}

void checkRank(const Argument& argument, int64_t rank, int size) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, argument.text(), ": expected a rank from 0 to ",
                    size - 1, ", found ", rank);
}

void checkOutput(const Argument& argument, const at::Tensor& tensor) {
  checkTensor(argument, tensor);
  TORCH_CHECK_VALUE(
      elementsAreApart(tensor), argument.text(),
      ": expected memory for each element, since the result is written to it, found strides ",
      tensor.strides(), " for sizes ", tensor.sizes());
  TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(), argument.text(),
                    ": expected a plain tensor, found a lazily conjugated or negated view");
}

void checkOutputs(const Argument& argument, const std::vector<at::Tensor>& tensors,
                  size_t expected) {
  checkCount(argument, tensors.size(), expected);
  for (size_t i = 0; i < tensors.size(); ++i) {
    checkOutput(argument.at(i), tensors[i]);
    checkSameDtype(argument.at(i), tensors[i], argument.at(0), tensors[0]);
  }
}

at::Tensor asInput(const Argument& argument, const at::Tensor& tensor) {
  checkTensor(argument, tensor);
  return tensor.resolve_conj().resolve_neg();
}

Buffer writable(const at::Tensor& tensor) {
  return {static_cast<uint8_t*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

Buffer readable(const at::Tensor& tensor) {
  // Engines never write into inputs; one Buffer type serves both.
  auto* data = const_cast<uint8_t*>(static_cast<const uint8_t*>(tensor.const_data_ptr()));
  return {data, tensor.nbytes()};
}

std::vector<Buffer> cut(Buffer whole, int parts) {
  const size_t bytes = whole.bytes / static_cast<size_t>(parts);
  std::vector<Buffer> buffers(static_cast<size_t>(parts));
  for (size_t i = 0; i < buffers.size(); ++i) {
    buffers[i] = {bytes > 0 ? whole.data + i * bytes : whole.data, bytes};
  }
  return buffers;
}

bool sums(const c10d::ReduceOp& reduce_op) {
  return reduce_op.op_ == c10d::ReduceOp::SUM || reduce_op.op_ == c10d::ReduceOp::AVG ||
         reduce_op.op_ == c10d::ReduceOp::PREMUL_SUM;
}

DType dtypeOfData(const at::Tensor& tensor) {
  return knownDtype(tensor.scalar_type()).value_or(DType::kUint8);
}

CheckedReduction reductionOf(const Argument& argument, const at::Tensor& tensor,
                             const c10d::ReduceOp& reduce_op) {
  at::ScalarType type = tensor.scalar_type();
  if (at::isComplexType(type) && sums(reduce_op)) type = c10::toRealValueType(type);
  const std::optional<DType> dtype = knownDtype(type);
  TORCH_CHECK_TYPE(dtype.has_value(), argument.text(),
                   ": expected a dtype that can be reduced (float, double, half, bfloat16, int8 to "
                   "int64, uint8, bool; "
                   "complex for SUM, AVG and PREMUL_SUM), found ",
                   tensor.scalar_type());
  if (const std::optional<ReduceKind> bitwise = bitwiseKindOf(reduce_op)) {
    TORCH_CHECK_TYPE(c10::isIntegralType(type, /*includeBool=*/true), argument.text(),
                     ": ReduceOp ", toString(*bitwise), ": expected integers or bool, found ",
                     tensor.scalar_type());
    return {*dtype, *bitwise};
  }
  return {*dtype, kindOf(argument, reduce_op, *dtype == DType::kBool)};
}

std::vector<Buffer> splitRows(const Argument& argument, const at::Tensor& tensor, Buffer whole,
                              const std::vector<int64_t>& splits, int size) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, argument.text(),
                    ": expected at least one dimension, found none");
  const int64_t rows = tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, argument.text(),
                      ": expected dimension 0 to be a multiple of the world size ", size,
                      " (no split sizes were given), found ", rows);
    return cut(whole, size);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(size), argument.text(), ": expected ",
                    size, " split sizes, found ", splits.size());
  int64_t sum = 0;
  for (const int64_t split : splits) {
    // Compared one by one, so that the sum cannot overflow.
    TORCH_CHECK_VALUE(split >= 0 && split <= rows - sum, argument.text(),
                      ": expected split sizes of at least 0 that add up to ", rows,
                      " (dimension 0), found ", splits);
    sum += split;
  }
  TORCH_CHECK_VALUE(sum == rows, argument.text(), ": expected split sizes that add up to ", rows,
                    " (dimension 0), found ", splits);
  const size_t row_bytes = rows > 0 ? whole.bytes / static_cast<size_t>(rows) : 0;
  std::vector<Buffer> buffers;
  buffers.reserve(splits.size());
  uint8_t* data = whole.data;
  for (const int64_t split : splits) {
    const size_t bytes = static_cast<size_t>(split) * row_bytes;
    buffers.push_back({data, bytes});
    if (bytes > 0) data += bytes;
  }
  return buffers;
}

}  // namespace torchft_ext
