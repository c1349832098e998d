// Operations on device tensors that go through host memory: one slab of pinned memory for each, and
// the copies between it and the tensors. The slab comes from torch's allocator of pinned memory,
// which keeps what was freed for the next one.
//
// Threads: stage() the issuing one; what it makes, as device/staged_side.h says.
#pragma once

#include <c10/core/Device.h>

#include "c10d/adapter/prepared.h"
#include "device/device_platform.h"

namespace torchft_ext {

// Behind what the caller has enqueued on the device's current stream. Once for each operation.
// nan_check: its contributions are looked at there too. NotImplementedError while a graph is
// captured on that stream.
void stage(Prepared& prepared, const c10::Device& device, const DevicePlatform& platform,
           bool nan_check);

}  // namespace torchft_ext
