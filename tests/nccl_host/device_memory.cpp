#include "device_memory.h"

#include <cstdlib>
#include <cstring>

namespace torchft_ext::nccl_host {

DeviceMemory& DeviceMemory::instance() {
  static auto* const memory = new DeviceMemory;  // NCCL's threads outlive static destructors
  return *memory;
}

void* DeviceMemory::allocate(size_t bytes) {
  constexpr size_t kPage = 4096;
  const size_t whole = (bytes + kPage - 1) / kPage * kPage;
  void* memory = std::aligned_alloc(kPage, whole == 0 ? kPage : whole);
  if (memory == nullptr) return nullptr;
  std::memset(memory, 0xa5, whole);  // CUDA's is not zero either
  MutexLock lock(mutex_);
  blocks_[reinterpret_cast<uintptr_t>(memory)] = bytes;
  return memory;
}

bool DeviceMemory::release(void* memory) {
  {
    MutexLock lock(mutex_);
    if (blocks_.erase(reinterpret_cast<uintptr_t>(memory)) == 0) return false;
  }
  std::free(memory);
  return true;
}

bool DeviceMemory::around(const void* inside, void** first, size_t* bytes) {
  const auto at = reinterpret_cast<uintptr_t>(inside);
  MutexLock lock(mutex_);
  auto after = blocks_.upper_bound(at);
  if (after == blocks_.begin()) return false;
  --after;
  if (at >= after->first + after->second) return false;
  if (first != nullptr) *first = reinterpret_cast<void*>(after->first);
  if (bytes != nullptr) *bytes = after->second;
  return true;
}

size_t DeviceMemory::live() {
  MutexLock lock(mutex_);
  return blocks_.size();
}

}  // namespace torchft_ext::nccl_host
