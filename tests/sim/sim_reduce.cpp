#include "sim_reduce.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>

#include <optional>

#include "sim_communicator.h"
#include "sim_faults.h"

namespace torchft_ext::sim {
namespace {

// Unsigned ones as their signed twins: the same bits for sums and products.
at::ScalarType scalarType(NcclType type) {
  switch (type) {
    case NcclType::kInt8:
      return at::kChar;
    case NcclType::kUint8:
      return at::kByte;
    case NcclType::kInt32:
    case NcclType::kUint32:
      return at::kInt;
    case NcclType::kInt64:
    case NcclType::kUint64:
      return at::kLong;
    case NcclType::kFloat16:
      return at::kHalf;
    case NcclType::kFloat32:
      return at::kFloat;
    case NcclType::kFloat64:
      return at::kDouble;
    case NcclType::kBFloat16:
      return at::kBFloat16;
    case NcclType::kFloat8E4M3:
      return at::kFloat8_e4m3fn;
    default:
      return at::kFloat8_e5m2;
  }
}

at::Tensor wrap(const void* data, size_t count, NcclType type) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(count)}, scalarType(type));
}

// What the reduction is done in: always another type than a short float.
at::Tensor widened(const void* data, size_t count, NcclType type) {
  const at::Tensor tensor = wrap(data, count, type);
  const bool short_float = tensor.is_floating_point() && tensor.element_size() < 4;
  return tensor.to(short_float ? at::kFloat : tensor.scalar_type(), /*non_blocking=*/false,
                   /*copy=*/true);
}

void fold(at::Tensor& total, const at::Tensor& next, NcclRedOp op) {
  if (op == kNcclProd) {
    total.mul_(next);
  } else if (op == kNcclMax) {
    total = at::maximum(total, next);
  } else if (op == kNcclMin) {
    total = at::minimum(total, next);
  } else {
    total.add_(next);
  }
}

}  // namespace

size_t sizeOf(NcclType type) {
  return c10::elementSize(scalarType(type));
}

void reduceBytes(std::vector<std::vector<char>>& parts, void* out, size_t count, NcclType type,
                 NcclRedOp op) {
  if (count == 0) return;
  if ((type == NcclType::kUint32 || type == NcclType::kUint64) && op != kNcclSum && op != kNcclProd)
    violation("this reduction of unsigned numbers is not simulated");
  at::Tensor total;
  for (const std::vector<char>& part : parts) {
    at::Tensor next = widened(part.data(), count, type);
    if (total.defined()) {
      fold(total, next, op);
    } else {
      total = next;
    }
  }
  if (op == kNcclAvg)
    total.div_(static_cast<int64_t>(parts.size()),
               total.is_floating_point() ? std::optional<c10::string_view>() : "trunc");
  wrap(out, count, type).copy_(total);
}

std::vector<char> multiplied(const void* data, size_t count, NcclType type, double factor) {
  std::vector<char> bytes(count * sizeOf(type));
  if (count > 0) wrap(bytes.data(), count, type).copy_(wrap(data, count, type).mul(factor));
  return bytes;
}

double numberAt(const void* data, NcclType type) {
  return wrap(data, 1, type).to(at::kDouble).item<double>();
}

}  // namespace torchft_ext::sim
