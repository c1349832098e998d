// Results for tensors that are not contiguous. Engines write contiguous memory only, and what goes
// over the wire is in the order of elements, whatever the layout of a rank's own tensor: so results
// go to a contiguous tensor in its place, and land in the caller's once the operation has succeeded
// (host memory), or behind it on its stream (device memory). A caller's tensor is untouched before.
//
// Threads: any; the host's copy runs where an operation is completed. It makes no tensors, and
// takes no lock.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <vector>

namespace torchft_ext {

struct Landing {
  at::Tensor contiguous;
  at::Tensor tensor;  // the caller's memory
};

// Copies on the host; null where there is nothing to copy. Whoever calls it keeps the memory.
std::function<void()> landOnHost(const std::vector<Landing>& landings);
// Enqueues the copies on the current stream.
void enqueueLandings(const std::vector<Landing>& landings);

}  // namespace torchft_ext
