// The functions of the CUDA driver that NCCL asks the runtime for, by name.
#include <cuda.h>

#include <cstring>
#include <map>
#include <vector>

#include "cuda_stand_in.h"
#include "device_memory.h"
#include "kernel.h"
#include "sim_device.h"

namespace torchft_ext::nccl_host {
namespace {

CUresult getErrorString(CUresult, const char** text) {
  *text = "an error of the simulated CUDA driver";
  return CUDA_SUCCESS;
}
CUresult deviceGet(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}
CUresult deviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;  // no virtual memory, no multicast, no DMA-BUF
  return CUDA_SUCCESS;
}
CUresult memGetAddressRange(CUdeviceptr* first, size_t* bytes, CUdeviceptr inside) {
  void* start = nullptr;
  if (!DeviceMemory::instance().around(reinterpret_cast<void*>(inside), &start, bytes))
    return CUDA_ERROR_NOT_FOUND;
  if (first != nullptr) *first = reinterpret_cast<CUdeviceptr>(start);
  return CUDA_SUCCESS;
}
CUresult ctxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
CUresult ctxSetCurrent(CUcontext) {
  return CUDA_SUCCESS;
}
CUresult ctxGetDevice(CUdevice* device) {
  *device = sim::currentDevice();
  return CUDA_SUCCESS;
}

// The kernel's arguments, packed, of `extra`.
std::vector<char> packed(void** extra) {
  const char* from = nullptr;
  size_t bytes = 0;
  for (; extra != nullptr && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) from = static_cast<const char*>(extra[1]);
    if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<const size_t*>(extra[1]);
  }
  return from == nullptr ? std::vector<char>() : std::vector<char>(from, from + bytes);
}

CUresult launch(CUfunction function, CUstream stream, void** extra) {
  return launchPlan(reinterpret_cast<const void*>(function), packed(extra),
                    *reinterpret_cast<sim::SimStream*>(stream))
             ? CUDA_SUCCESS
             : CUDA_ERROR_INVALID_VALUE;
}
CUresult launchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void** extra) {
  return launch(function, config->hStream, extra);
}
CUresult launchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned,
                      unsigned, unsigned, CUstream stream, void**, void** extra) {
  return launch(function, stream, extra);
}

template <class Function>
const void* checked(Function* ours) {
  return reinterpret_cast<const void*>(ours);
}

}  // namespace

const void* driverFunction(const std::string& name) {
  static const std::map<std::string, const void*> known = {
      {"cuGetErrorString", checked<decltype(cuGetErrorString)>(getErrorString)},
      {"cuGetErrorName", checked<decltype(cuGetErrorName)>(getErrorString)},
      {"cuDeviceGet", checked<decltype(cuDeviceGet)>(deviceGet)},
      {"cuDeviceGetAttribute", checked<decltype(cuDeviceGetAttribute)>(deviceGetAttribute)},
      {"cuMemGetAddressRange", checked<decltype(cuMemGetAddressRange)>(memGetAddressRange)},
      {"cuCtxGetCurrent", checked<decltype(cuCtxGetCurrent)>(ctxGetCurrent)},
      {"cuCtxSetCurrent", checked<decltype(cuCtxSetCurrent)>(ctxSetCurrent)},
      {"cuCtxGetDevice", checked<decltype(cuCtxGetDevice)>(ctxGetDevice)},
      {"cuLaunchKernel", checked<decltype(cuLaunchKernel)>(launchKernel)},
      {"cuLaunchKernelEx", checked<decltype(cuLaunchKernelEx)>(launchKernelEx)},
  };
  const auto found = known.find(name);
  return found == known.end() ? nullptr : found->second;
}

}  // namespace torchft_ext::nccl_host
