// From a c10d group to its backend of this library. Any thread; never blocks.
#pragma once

#include "c10d/group/ft_backend.h"
#include "torchft_ext/torch/process_group.h"

namespace torchft_ext {

// Null: the group is null, or has no such backend.
c10::intrusive_ptr<FtBackend> backendIn(const ProcessGroupPtr& group);
// Throws std::invalid_argument instead, in the caller's name.
c10::intrusive_ptr<FtBackend> backendOf(const char* caller, const ProcessGroupPtr& group);

}  // namespace torchft_ext
