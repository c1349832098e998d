#include "c10d/adapter/nan_check.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "c10d/adapter/device_memory.h"

namespace torchft_ext {
namespace {

// Those that lie one behind the other are one.
std::vector<Buffer> merge(const std::vector<Buffer>& buffers) {
  std::vector<Buffer> merged;
  for (const Buffer& buffer : buffers) {
    if (!merged.empty() && merged.back().data + merged.back().bytes == buffer.data) {
      merged.back().bytes += buffer.bytes;
    } else {
      merged.push_back(buffer);
    }
  }
  return merged;
}

bool holds(const at::Tensor& tensor, const Buffer& buffer) {
  const auto* begin = static_cast<const uint8_t*>(tensor.const_data_ptr());
  return begin <= buffer.data && buffer.data < begin + tensor.nbytes();
}

// Of the tensor that the buffer begins in: the operation's own dtype may be that of its bytes.
std::optional<at::ScalarType> typeOf(const Buffer& buffer, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (holds(tensor, buffer)) return tensor.scalar_type();
  }
  return std::nullopt;
}

// float8 has no comparisons of its own.
at::Tensor anyNan(const at::Tensor& values) {
  const at::Tensor wide = values.element_size() == 1 ? values.to(at::kHalf) : values;
  return wide.ne(wide).any();
}

bool mayBeNan(at::ScalarType type) {
  return c10::isFloat8Type(type) || (c10::isFloatingType(type) && c10::elementSize(type) > 1);
}

// A contiguous copy is loaded later: the caller's tensor is looked at in its place.
const ContiguousCopy* contiguousCopyAt(const Buffer& buffer,
                                       const std::vector<ContiguousCopy>& contiguous_copies) {
  for (const ContiguousCopy& each : contiguous_copies) {
    if (holds(each.contiguous, buffer)) return &each;
  }
  return nullptr;
}

std::optional<at::Tensor> realNumbersOf(const at::Tensor& tensor) {
  const at::Tensor numbers = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  return mayBeNan(numbers.scalar_type()) ? std::optional(numbers) : std::nullopt;
}

}  // namespace

std::vector<at::Tensor> contributionsOf(const Prepared& prepared) {
  std::vector<at::Tensor> contributions;
  if (prepared.given.defined()) {
    if (const auto values = realNumbersOf(prepared.given)) contributions.push_back(*values);
    return contributions;
  }
  std::vector<Buffer> plain;
  const ContiguousCopy* last = nullptr;  // the parts of one follow each other
  for (const Buffer& buffer : prepared.reads()) {
    if (buffer.bytes == 0) continue;
    const ContiguousCopy* contiguous_copy = contiguousCopyAt(buffer, prepared.loads);
    if (contiguous_copy == nullptr) {
      plain.push_back(buffer);
    } else if (std::exchange(last, contiguous_copy) != contiguous_copy) {
      if (const auto values = realNumbersOf(contiguous_copy->tensor))
        contributions.push_back(*values);
    }
  }
  for (const Buffer& buffer : merge(plain)) {
    auto type = typeOf(buffer, prepared.tensors);
    if (!type) type = typeOf(buffer, prepared.kept);
    if (type && c10::isComplexType(*type)) type = c10::toRealValueType(*type);
    if (type && mayBeNan(*type))
      contributions.push_back(viewOf(buffer, prepared.tensors.front().device(), *type));
  }
  return contributions;
}

bool holdsNan(const std::vector<at::Tensor>& contributions) {
  return std::any_of(contributions.begin(), contributions.end(),
                     [](const at::Tensor& values) { return anyNan(values).item<bool>(); });
}

std::function<bool()> enqueueNanCheck(const std::vector<at::Tensor>& contributions) {
  at::Tensor found = anyNan(contributions.front());
  for (size_t i = 1; i < contributions.size(); ++i) found.logical_or_(anyNan(contributions[i]));
  const at::Tensor answer = sharedByte(found.device().type());
  answer.copy_(found, /*non_blocking=*/true);
  return [answer] { return readShared(answer) != 0; };
}

std::string nanFound(OpKind kind) {
  return std::string("nan_check found NaN in its input of the ") + toString(kind);
}

}  // namespace torchft_ext
