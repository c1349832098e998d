// Contiguous tensors that stand in for callers' that are not. Engines read and write contiguous
// memory only, and what goes over the wire is in the order of elements, whatever the layout of a
// rank's own tensor. A contiguous copy is loaded when the operation's turn has come, after those
// issued before it, and stored once the operation is through. The caller's tensor is untouched
// before.
//
// Threads: any.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "comm/strided_copy.h"

namespace torchft_ext {

struct ContiguousCopy {
  at::Tensor contiguous;
  at::Tensor tensor;  // the caller's memory
};

// On the host. Whoever runs the copies keeps the memory.
std::vector<StridedCopy> loadsOf(const std::vector<ContiguousCopy>& contiguous_copies);
std::vector<StridedCopy> storesOf(const std::vector<ContiguousCopy>& contiguous_copies);
// Enqueued on the current stream.
void enqueueLoads(const std::vector<ContiguousCopy>& contiguous_copies);
void enqueueStores(const std::vector<ContiguousCopy>& contiguous_copies);

}  // namespace torchft_ext
