#include "c10d/stand_in.h"

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

uint8_t* dataOf(const StandIn& stand_in) {
  return static_cast<uint8_t*>(stand_in.contiguous.mutable_data_ptr());
}

}  // namespace

std::vector<StridedCopy> loadsOf(const std::vector<StandIn>& stand_ins) {
  std::vector<StridedCopy> copies;
  copies.reserve(stand_ins.size());
  for (const StandIn& each : stand_ins)
    copies.push_back(StridedCopy::load(memoryOf(each.tensor), dataOf(each)));
  return copies;
}

std::vector<StridedCopy> storesOf(const std::vector<StandIn>& stand_ins) {
  std::vector<StridedCopy> copies;
  copies.reserve(stand_ins.size());
  for (const StandIn& each : stand_ins)
    copies.push_back(StridedCopy::store(dataOf(each), memoryOf(each.tensor)));
  return copies;
}

void enqueueLoads(const std::vector<StandIn>& stand_ins) {
  for (const StandIn& each : stand_ins) {
    at::Tensor contiguous = each.contiguous;
    contiguous.copy_(each.tensor, /*non_blocking=*/true);
  }
}

void enqueueStores(const std::vector<StandIn>& stand_ins) {
  for (const StandIn& each : stand_ins) {
    at::Tensor tensor = each.tensor;
    tensor.copy_(each.contiguous, /*non_blocking=*/true);
  }
}

}  // namespace torchft_ext
