#include "host/reduce.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace torchft_ext {
namespace {

at::ScalarType scalarTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return at::kFloat;
    case DType::kDouble:
      return at::kDouble;
    case DType::kHalf:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kInt8:
      return at::kChar;
    case DType::kInt16:
      return at::kShort;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt64:
      return at::kLong;
    case DType::kUint8:
      return at::kByte;
    case DType::kBool:
      return at::kBool;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      break;
  }
  throw std::logic_error("no ATen type for item type " + std::to_string(static_cast<int>(dtype)));
}

at::Tensor spanOf(const uint8_t* data, size_t bytes, DType dtype) {
  // from_blob has no const; the callers pass only what ATen reads.
  return at::from_blob(const_cast<uint8_t*>(data), {static_cast<int64_t>(bytes / itemSize(dtype))},
                       at::TensorOptions().dtype(scalarTypeOf(dtype)));
}

// ATen hands spans of more than GRAIN_SIZE items to an OpenMP pool, which the loop's thread would
// get one of its own of and which would compete with the training's threads for the cores. In
// shorter pieces everything runs on this thread. (c10::ParallelGuard does not keep it from the
// pool: at::in_parallel_region() asks OpenMP.)
template <typename Body>
void inPieces(size_t bytes, DType dtype, Body body) {
  const c10::InferenceMode without_autograd;
  const size_t longest = static_cast<size_t>(at::internal::GRAIN_SIZE) * itemSize(dtype);
  for (size_t begin = 0; begin < bytes; begin += longest) {
    body(begin, std::min(longest, bytes - begin));
  }
}

void reduceBools(at::Tensor& into, const at::Tensor& from, ReduceKind op) {
  const bool any = op == ReduceKind::kSum || op == ReduceKind::kMax || op == ReduceKind::kAvg ||
                   op == ReduceKind::kBor;
  if (op == ReduceKind::kBxor) {
    at::bitwise_xor_out(into, into, from);
  } else if (any) {
    at::bitwise_or_out(into, into, from);
  } else {
    at::bitwise_and_out(into, into, from);
  }
}

void reducePiece(at::Tensor target, const at::Tensor& other, ReduceKind op) {
  if (target.scalar_type() == at::kBool) return reduceBools(target, other, op);
  switch (op) {
    case ReduceKind::kSum:
    case ReduceKind::kAvg:
    case ReduceKind::kPreMulSum:
      at::add_out(target, target, other);
      return;
    case ReduceKind::kProduct:
      at::mul_out(target, target, other);
      return;
    case ReduceKind::kMin:
      at::minimum_out(target, target, other);
      return;
    case ReduceKind::kMax:
      at::maximum_out(target, target, other);
      return;
    case ReduceKind::kBand:
      at::bitwise_and_out(target, target, other);
      return;
    case ReduceKind::kBor:
      at::bitwise_or_out(target, target, other);
      return;
    case ReduceKind::kBxor:
      at::bitwise_xor_out(target, target, other);
      return;
  }
}

void dividePiece(const at::Tensor& target, int divisor) {
  if (at::isIntegralType(target.scalar_type(), /*includeBool=*/false)) {
    target.div_(divisor, "trunc");
  } else {
    target.div_(divisor);
  }
}

// The memory need not be aligned for T: it is a row of something.
template <typename T>
void addItems(uint8_t* into, const uint8_t* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += sizeof(T)) {
    T sum;
    T other;
    std::memcpy(&sum, into + at, sizeof(T));
    std::memcpy(&other, from + at, sizeof(T));
    if constexpr (std::is_same_v<T, bool>) {
      sum = sum || other;
    } else if constexpr (std::is_integral_v<T>) {
      // As unsigned numbers, whose sum may wrap round.
      using Unsigned = std::make_unsigned_t<T>;
      sum = static_cast<T>(static_cast<Unsigned>(sum) + static_cast<Unsigned>(other));
    } else {
      sum = static_cast<T>(sum + other);
    }
    std::memcpy(into + at, &sum, sizeof(T));
  }
}

}  // namespace

void addShort(uint8_t* into, const uint8_t* from, size_t bytes, DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return addItems<float>(into, from, bytes);
    case DType::kDouble:
      return addItems<double>(into, from, bytes);
    case DType::kHalf:
      return addItems<at::Half>(into, from, bytes);
    case DType::kBFloat16:
      return addItems<at::BFloat16>(into, from, bytes);
    case DType::kInt8:
      return addItems<int8_t>(into, from, bytes);
    case DType::kInt16:
      return addItems<int16_t>(into, from, bytes);
    case DType::kInt32:
      return addItems<int32_t>(into, from, bytes);
    case DType::kInt64:
      return addItems<int64_t>(into, from, bytes);
    case DType::kUint8:
      return addItems<uint8_t>(into, from, bytes);
    case DType::kBool:
      return addItems<bool>(into, from, bytes);
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      break;
  }
  scalarTypeOf(dtype);  // says which it is
}

void reduceInto(uint8_t* into, const uint8_t* from, size_t bytes, DType dtype, ReduceKind op) {
  inPieces(bytes, dtype, [&](size_t begin, size_t length) {
    reducePiece(spanOf(into + begin, length, dtype), spanOf(from + begin, length, dtype), op);
  });
}

void multiplyInto(uint8_t* data, const uint8_t* from, size_t bytes, DType dtype,
                  const uint8_t* factor) {
  const at::Tensor scalar = spanOf(factor, itemSize(dtype), dtype);  // broadcast
  inPieces(bytes, dtype, [&](size_t begin, size_t length) {
    at::Tensor target = spanOf(data + begin, length, dtype);
    at::mul_out(target, spanOf(from + begin, length, dtype), scalar);
  });
}

void divideBy(uint8_t* data, size_t bytes, DType dtype, int divisor) {
  inPieces(bytes, dtype, [&](size_t begin, size_t length) {
    dividePiece(spanOf(data + begin, length, dtype), divisor);
  });
}

}  // namespace torchft_ext
