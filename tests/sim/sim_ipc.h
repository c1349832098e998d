// DeviceIpc over the simulated device: handles are the places of anonymous files (/proc/PID/fd/N).
// Beyond CUDA, a process may open what it has made itself. Memory can be lent that was allocated
// after shareMemory() (sim_device.h). Threads: as DeviceIpc says.
#pragma once

#include <memory>

#include "device/device_ipc.h"

namespace torchft_ext::sim {

std::shared_ptr<DeviceIpc> makeSimIpc();

}  // namespace torchft_ext::sim
