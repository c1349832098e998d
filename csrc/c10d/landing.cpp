#include "c10d/landing.h"

#include <cstdint>
#include <cstring>

namespace torchft_ext {
namespace {

// Not ATen's copy: that would start a pool of threads for the engine's own.
struct StridedCopy {
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
  size_t item = 0;
  std::vector<size_t> sizes;
  std::vector<size_t> strides;  // in bytes
};

StridedCopy copyOf(const Landing& landing) {
  const at::Tensor& tensor = landing.tensor;
  StridedCopy copy;
  copy.from = static_cast<const uint8_t*>(landing.contiguous.const_data_ptr());
  copy.to = static_cast<uint8_t*>(tensor.mutable_data_ptr());
  copy.item = static_cast<size_t>(tensor.element_size());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    copy.sizes.push_back(static_cast<size_t>(tensor.size(dim)));
    copy.strides.push_back(static_cast<size_t>(tensor.stride(dim)) * copy.item);
  }
  return copy;
}

template <size_t kItem>
void copyItems(const uint8_t* from, uint8_t* to, size_t count, size_t stride) {
  for (size_t i = 0; i < count; ++i) std::memcpy(to + i * stride, from + i * kItem, kItem);
}

void copyRow(const StridedCopy& copy, const uint8_t* from, uint8_t* to) {
  const size_t count = copy.sizes.back();
  const size_t stride = copy.strides.back();
  if (stride == copy.item) {
    std::memcpy(to, from, count * copy.item);
    return;
  }
  switch (copy.item) {
    case 1:
      return copyItems<1>(from, to, count, stride);
    case 2:
      return copyItems<2>(from, to, count, stride);
    case 4:
      return copyItems<4>(from, to, count, stride);
    case 8:
      return copyItems<8>(from, to, count, stride);
    default:
      for (size_t i = 0; i < count; ++i)
        std::memcpy(to + i * stride, from + i * copy.item, copy.item);
  }
}

// Returns where the elements behind these begin.
const uint8_t* copyFrom(const StridedCopy& copy, size_t dim, const uint8_t* from, uint8_t* to) {
  if (dim + 1 == copy.sizes.size()) {
    copyRow(copy, from, to);
    return from + copy.sizes[dim] * copy.item;
  }
  for (size_t i = 0; i < copy.sizes[dim]; ++i)
    from = copyFrom(copy, dim + 1, from, to + i * copy.strides[dim]);
  return from;
}

}  // namespace

std::function<void()> landOnHost(const std::vector<Landing>& landings) {
  std::vector<StridedCopy> copies;
  for (const Landing& landing : landings) {
    if (landing.tensor.numel() > 0) copies.push_back(copyOf(landing));
  }
  if (copies.empty()) return {};
  return [copies = std::move(copies)] {
    for (const StridedCopy& copy : copies) copyFrom(copy, 0, copy.from, copy.to);
  };
}

void enqueueLandings(const std::vector<Landing>& landings) {
  for (const Landing& landing : landings) {
    at::Tensor tensor = landing.tensor;
    tensor.copy_(landing.contiguous, /*non_blocking=*/true);
  }
}

}  // namespace torchft_ext
