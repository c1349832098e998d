#include "c10d/adapter/premul_sum.h"

#include <cstring>

namespace torchft_ext {
namespace {

// As torch's own conversion of a number: to the nearest of that dtype.
at::ScalarType scalarTypeOf(const Argument& argument, const at::Tensor& tensor, DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return at::kFloat;
    case DType::kDouble:
      return at::kDouble;
    case DType::kHalf:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    default:
      break;
  }
  TORCH_CHECK_TYPE(false, argument.text(),
                   ": ReduceOp.PREMUL_SUM: expected float, double, half or bfloat16 (or complex "
                   "numbers of these), found ",
                   tensor.scalar_type());
}

Factor factorFrom(const at::Tensor& on_cpu, at::ScalarType type) {
  const at::Tensor converted = on_cpu.to(type).contiguous();
  Factor factor;
  std::memcpy(factor.item.data(), converted.const_data_ptr(), converted.element_size());
  return factor;
}

}  // namespace

Factor factorOf(const Argument& argument, const at::Tensor& tensor, DType dtype,
                const c10d::ReduceOp& reduce_op) {
  const at::ScalarType type = scalarTypeOf(argument, tensor, dtype);
  // c10d's own name for it in torch 2.11; later ones keep it.
  const auto* given =
      dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(reduce_op.supplement_.get());
  TORCH_CHECK_VALUE(given != nullptr, argument.op,
                    ": op: expected a PREMUL_SUM with its factor, found one without");
  if (!given->tensor_factor.defined())
    return factorFrom(at::scalar_tensor(given->double_factor, at::kDouble), type);
  const at::Tensor factor = given->tensor_factor.detach();
  TORCH_CHECK_VALUE(factor.numel() == 1, argument.op, ": op: factor: expected one element, found ",
                    factor.numel());
  TORCH_CHECK_TYPE(!factor.is_complex(), argument.op,
                   ": op: factor: expected a real number, found dtype ", factor.scalar_type());
  if (factor.is_cpu()) return factorFrom(factor, type);
  TORCH_CHECK_VALUE(factor.device() == tensor.device(), argument.op,
                    ": op: factor: expected it on the CPU or on ", tensor.device(), " as ",
                    argument.name, " is, found ", factor.device());
  Factor on_device;
  on_device.on_device = factor.to(type).contiguous();
  return on_device;
}

}  // namespace torchft_ext
