// The CUDA runtime and driver that NCCL's library calls, over the simulated device: memory of the
// host, streams of tests/sim, kernels of this folder.
//
// What is there is what NCCL needs without peer access and CUDA's virtual memory; any other
// function fails, and is a violation (sim_faults.h).
//
// Threads: any.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace torchft_ext::nccl_host {

struct StandIn {
  const char* name;
  const void* function;
};
std::vector<StandIn> cudaRuntime();
std::vector<StandIn> cudaGraphs();
std::vector<StandIn> nvml();  // NCCL's own functions around it, by their mangled names
// Null: this driver has no such function.
const void* driverFunction(const std::string& name);

// What NCCL has allocated and not freed, on the host and on devices.
size_t liveAllocations();

}  // namespace torchft_ext::nccl_host
