// Memory that NCCL asked CUDA for: the host's, counted.
//
// Threads: any. Owner: whoever allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "base/mutex.h"

namespace torchft_ext::nccl_host {

class DeviceMemory {
 public:
  static DeviceMemory& instance();

  void* allocate(size_t bytes);  // null: there is none
  bool release(void* memory);    // false: it is none of these
  // The allocation around `inside`. False: it is none of these.
  bool around(const void* inside, void** first, size_t* bytes);
  size_t live();

 private:
  Mutex mutex_;
  std::map<uintptr_t, size_t> blocks_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext::nccl_host
