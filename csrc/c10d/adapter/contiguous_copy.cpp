#include "c10d/adapter/contiguous_copy.h"

#include <cstdint>

namespace torchft_ext {
namespace {

StridedMemory memoryOf(const at::Tensor& tensor) {
  StridedMemory memory;
  // Read only, where it is an input.
  memory.data = const_cast<uint8_t*>(static_cast<const uint8_t*>(tensor.const_data_ptr()));
  memory.item = static_cast<size_t>(tensor.element_size());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    memory.sizes.push_back(static_cast<size_t>(tensor.size(dim)));
    memory.strides.push_back(static_cast<size_t>(tensor.stride(dim)) * memory.item);
  }
  return memory;
}

uint8_t* dataOf(const ContiguousCopy& contiguous_copy) {
  return static_cast<uint8_t*>(contiguous_copy.contiguous.mutable_data_ptr());
}

}  // namespace

std::vector<StridedCopy> loadsOf(const std::vector<ContiguousCopy>& contiguous_copies) {
  std::vector<StridedCopy> copies;
  copies.reserve(contiguous_copies.size());
  for (const ContiguousCopy& each : contiguous_copies)
    copies.push_back(StridedCopy::load(memoryOf(each.tensor), dataOf(each)));
  return copies;
}

std::vector<StridedCopy> storesOf(const std::vector<ContiguousCopy>& contiguous_copies) {
  std::vector<StridedCopy> copies;
  copies.reserve(contiguous_copies.size());
  for (const ContiguousCopy& each : contiguous_copies)
    copies.push_back(StridedCopy::store(dataOf(each), memoryOf(each.tensor)));
  return copies;
}

void enqueueLoads(const std::vector<ContiguousCopy>& contiguous_copies) {
  for (const ContiguousCopy& each : contiguous_copies) {
    at::Tensor contiguous = each.contiguous;
    contiguous.copy_(each.tensor, /*non_blocking=*/true);
  }
}

void enqueueStores(const std::vector<ContiguousCopy>& contiguous_copies) {
  for (const ContiguousCopy& each : contiguous_copies) {
    at::Tensor tensor = each.tensor;
    tensor.copy_(each.contiguous, /*non_blocking=*/true);
  }
}

}  // namespace torchft_ext
