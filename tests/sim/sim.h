// The simulator as tests use it from C++. From Python: simulator.py.
//
// What it is: tests/sim/README.md. Never part of the package.
#pragma once

#include <memory>
#include <string>

#include "nccl/nccl_platform.h"
#include "sim_cuda.h"
#include "sim_device.h"
#include "sim_faults.h"
#include "sim_nccl.h"

namespace torchft_ext::sim {

std::shared_ptr<const NcclPlatform> platform();
// platform() in place of the real one, for all engines made later.
void install();

}  // namespace torchft_ext::sim
