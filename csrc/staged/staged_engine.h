// The CPU engine for device tensors too: an operation's contributions are copied into host memory,
// the CPU engine carries it out there, and its results are copied back. No library of the device is
// needed. docs/staged.md has the states.
//
// Owner: groups share it. Threads: any. form() blocks as the CPU engine's does.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "device/device_platform.h"

namespace torchft_ext {

std::shared_ptr<Engine> makeStagedEngine(std::shared_ptr<Engine> host,
                                         std::shared_ptr<const DevicePlatform> platform);
// Ends the thread that all such engines share. False: it did not end by the deadline; it is
// registered as stuck.
bool stopStagedEngines(Deadline deadline);

}  // namespace torchft_ext
