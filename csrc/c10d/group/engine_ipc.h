// What lends this process's device memory to a child process: that of the engine for devices.
#pragma once

#include <memory>

#include "device/device_ipc.h"

namespace torchft_ext {

// Any thread; may load libraries. NotImplementedError, with the reason, where the engine "nccl" or
// its device is not here.
std::shared_ptr<DeviceIpc> deviceIpc();

}  // namespace torchft_ext
