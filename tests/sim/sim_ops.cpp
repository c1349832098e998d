// ATen kernels of the simulated device. In-place operations and copies between device tensors are
// enqueued on the current stream, as on a real device; everything else synchronises the current
// stream and runs on the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "sim_device.h"

namespace torchft_ext::sim {
namespace {

bool onDevice(const at::Tensor& tensor) {
  return tensor.is_privateuseone();
}

// The same memory as a CPU tensor. It keeps nothing alive: memory is freed in stream order.
at::Tensor alias(const at::Tensor& tensor) {
  at::Tensor twin =
      at::from_blob(tensor.numel() == 0 ? nullptr : tensor.data_ptr(), tensor.sizes(),
                    tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
  if (tensor.is_conj()) twin._set_conj(true);
  if (tensor.is_neg()) twin._set_neg(true);
  return twin;
}

struct Use {  // what a task touches
  const void* data = nullptr;
  size_t bytes = 0;
};

Use useOf(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {tensor.data_ptr(), (static_cast<size_t>(last) + 1) * tensor.element_size()};
}

void enqueue(SimStream& stream, std::vector<Use> uses, std::function<void()> kernel) {
  stream.enqueue([uses = std::move(uses), kernel = std::move(kernel)] {
    std::vector<Pin> pins;
    for (const Use& use : uses) {
      pins.emplace_back(use.data, use.bytes, "a kernel");
      if (!pins.back().ok()) return;
    }
    kernel();
  });
}

// ---- allocation

c10::Device deviceOf(std::optional<c10::Device> wanted) {
  if (wanted && wanted->has_index()) return *wanted;
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(currentDevice())};
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<c10::Device> device,
                 std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(deviceOf(device));
  c10::Allocator* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  return at::detail::empty_generic(size, allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor emptyStrided(at::IntArrayRef size, at::IntArrayRef stride,
                        std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                        std::optional<c10::Device> device, std::optional<bool> /*pin*/) {
  const c10::DeviceGuard guard(deviceOf(device));
  c10::Allocator* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, allocator, kKeys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  currentStream().synchronize();
  return at::native::resize_(self, size, format);
}

at::Tensor& setStorage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

// ---- copies

void copyOnDevice(const at::Tensor& from, const at::Tensor& to) {
  SimStream& stream = currentStream(from.device().index());
  SimStream& other = currentStream(to.device().index());
  auto before = std::make_shared<SimEvent>(other.device, false);
  auto after = std::make_shared<SimEvent>(stream.device, false);
  if (&stream != &other) {
    other.record(before);
    stream.block(before);
  }
  enqueue(stream, {useOf(from), useOf(to)},
          [source = alias(from), target = alias(to)] { target.copy_(source); });
  if (&stream != &other) {
    stream.record(after);
    other.block(after);
  }
}

// Into pinned memory a copy that need not be waited for runs in stream order, as on a real device.
void copyToHost(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  SimStream& stream = currentStream(from.device().index());
  if (non_blocking && to.is_pinned()) {
    enqueue(stream, {useOf(from)}, [source = alias(from), to] { to.copy_(source); });
    return;
  }
  stream.synchronize();
  to.copy_(alias(from));
}

// From pinned memory it is read when the stream comes to the copy.
void copyFromHost(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool later = non_blocking && from.is_pinned();
  enqueue(currentStream(to.device().index()), {useOf(to)},
          [staged = later ? from : from.clone(), target = alias(to)] { target.copy_(staged); });
}

at::Tensor copyFrom(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (onDevice(from) && onDevice(to)) {
    copyOnDevice(from, to);
  } else if (onDevice(from)) {
    copyToHost(from, to, non_blocking);
  } else {
    copyFromHost(from, to, non_blocking);
  }
  return to;
}

at::Tensor copyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copyFrom(from, to, false);
}

// ---- everything else

// What a kernel may hold beyond this call: device memory, and numbers that torch wrapped.
bool canWait(const at::Tensor& tensor) {
  return !tensor.defined() || onDevice(tensor) || tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

void stage(c10::IValue& value, std::vector<Use>& uses) {
  if (value.isTensor() && value.toTensor().defined() && onDevice(value.toTensor())) {
    uses.push_back(useOf(value.toTensor()));
    value = alias(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> twins;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      uses.push_back(useOf(tensor));
      twins.push_back(alias(tensor));
    }
    value = twins;
  }
}

bool inPlace(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments) {
  const std::string& name = schema.name();
  if (name.back() != '_' || arguments.empty()) return false;
  for (const c10::IValue& value : arguments) {
    if (value.isTensor() && !canWait(value.toTensor())) return false;
    if (value.isOptionalTensorList()) return false;  // index_put_
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (!tensor.defined() || !onDevice(tensor)) return false;
      }
    }
  }
  return arguments.front().isTensorList() ||
         (arguments.front().isTensor() && onDevice(arguments.front().toTensor()));
}

const at::Tensor& firstTensor(const c10::IValue& value, at::Tensor& hold) {
  hold = value.isTensorList() ? value.toTensorVector().at(0) : value.toTensor();
  return hold;
}

void enqueueInPlace(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  torch::jit::Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  stack->resize(stack->size() - count);
  at::Tensor hold;
  SimStream& stream = currentStream(firstTensor(arguments.front(), hold).device().index());
  if (!op.schema().returns().empty()) stack->push_back(arguments.front());
  std::vector<Use> uses;
  for (c10::IValue& value : arguments) stage(value, uses);
  enqueue(stream, std::move(uses), [op, arguments] {
    torch::jit::Stack staged = arguments;  // a graph runs it again
    op.callBoxed(&staged);
  });
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const torch::jit::Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count),
                                    stack->end());
  if (inPlace(op.schema(), arguments)) {
    enqueueInPlace(op, stack);
  } else {
    at::native::cpu_fallback(op, stack);
  }
}

void recordStream(at::Tensor& self, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("record_stream", recordStream);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", emptyStrided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", setStorage);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_copy_from", copyFrom);
  m.impl("_copy_from_and_resize", copyFromAndResize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
}

// Operations whose default for any device is "compute a new tensor, copy it back": named here, they
// reach the fallback, and so the stream.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name :
       {"add_.Tensor", "sub_.Tensor", "mul_.Tensor", "div_.Tensor", "div_.Tensor_mode", "neg_",
        "sqrt_", "reciprocal_", "pow_.Scalar", "addcmul_", "addcdiv_", "lerp_.Scalar",
        "bitwise_or_.Tensor", "bitwise_and_.Tensor", "ne_.Scalar", "eq_.Scalar", "gt_.Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace
}  // namespace torchft_ext::sim
