#include "c10d/adapter/device_arguments.h"

#include <c10/util/Exception.h>

#include <optional>
#include <string>

namespace torchft_ext {
namespace {

// What the library computes with.
std::optional<DType> numberType(at::ScalarType type) {
  const std::optional<DType> dtype = namedDtype(type);
  if (dtype == DType::kInt16 || dtype == DType::kBool) return std::nullopt;
  return dtype;
}

DeviceReduction boolReduction(const Argument& argument, c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::MAX:
    case c10d::ReduceOp::BOR:
      return {DType::kUint8, ReduceKind::kMax};
    case c10d::ReduceOp::PRODUCT:
    case c10d::ReduceOp::MIN:
    case c10d::ReduceOp::BAND:
      return {DType::kUint8, ReduceKind::kMin};
    case c10d::ReduceOp::BXOR:
      return {DType::kUint8, ReduceKind::kSum, true};  // a byte's overflow keeps its parity
    default:
      break;
  }
  TORCH_CHECK_TYPE(op != c10d::ReduceOp::AVG, argument.text(),
                   ": ReduceOp.AVG: expected a number type, found bool");
  TORCH_CHECK_VALUE(false, argument.op,
                    ": op: expected ReduceOp SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR for a bool "
                    "device tensor, found ReduceOp number ",
                    static_cast<int>(op));
}

// The type under which the library gives the same bits.
at::ScalarType contiguousCopy(at::ScalarType type, const c10d::ReduceOp& reduce_op) {
  const c10d::ReduceOp::RedOpType op = reduce_op.op_;
  if (at::isComplexType(type) && sums(reduce_op)) return c10::toRealValueType(type);
  const bool modular = op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::PRODUCT;
  if (type == at::kUInt32 && modular) return at::kInt;
  if (type == at::kUInt64 && modular) return at::kLong;
  return type;
}

}  // namespace

DeviceReduction deviceReductionOf(const Argument& argument, const at::Tensor& tensor,
                                  const c10d::ReduceOp& reduce_op, const DevicePlatform& platform) {
  const c10d::ReduceOp::RedOpType op = reduce_op.op_;
  const at::ScalarType type = tensor.scalar_type();
  if (type == at::kBool) return boolReduction(argument, op);
  const std::optional<ReduceKind> kind = arithmeticKind(op);
  TORCH_CHECK_VALUE(
      kind.has_value(), argument.op,
      ": op: expected ReduceOp SUM, AVG, PRODUCT, MIN, MAX or PREMUL_SUM for a device tensor "
      "(BAND, BOR, BXOR for bool), found ReduceOp number ",
      static_cast<int>(op));
  const std::optional<DType> dtype = numberType(contiguousCopy(type, reduce_op));
  TORCH_CHECK_TYPE(dtype.has_value(), argument.text(), ": expected a dtype that ",
                   platform.library(),
                   " can reduce (float, double, half, bfloat16, "
                   "float8, int8, int32, int64, uint8, bool; complex for SUM, AVG and PREMUL_SUM; "
                   "uint32 and uint64 for SUM and PRODUCT), found ",
                   type);
  const std::string lacks = platform.lacksToReduce(*dtype);
  TORCH_CHECK_TYPE(lacks.empty(), argument.text(), ": reductions of ", type, " need ", lacks);
  return {*dtype, *kind};
}

DType movable(DType dtype) {
  switch (dtype) {
    case DType::kInt16:
    case DType::kBool:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return DType::kUint8;
    default:
      return dtype;
  }
}

}  // namespace torchft_ext
