// NCCL's functions around NVIDIA's management library: devices without NVLink.
#include <cstdio>
#include <cstdlib>

#include "cuda_stand_in.h"

namespace torchft_ext::nccl_host {
namespace {

constexpr int kSuccess = 0;
constexpr int kSystemError = 2;  // of NCCL: what it takes for "this device has none"

int ensureInitialized() {
  return kSuccess;
}
// A handle is the device's bus number.
int handleByBusId(const char* bus_id, void** device) {
  unsigned bus = 0;
  if (std::sscanf(bus_id, "%*x:%x", &bus) != 1) return kSystemError;
  *device = reinterpret_cast<void*>(static_cast<uintptr_t>(bus));
  return kSuccess;
}
int index(void* device, unsigned* number) {
  *number = static_cast<unsigned>(reinterpret_cast<uintptr_t>(device)) - 0x40;
  return kSuccess;
}
int handleByIndex(unsigned number, void** device) {
  *device = reinterpret_cast<void*>(static_cast<uintptr_t>(number) + 0x40);
  return kSuccess;
}
int capability(void*, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return kSuccess;
}
int confidential(bool* status) {
  status[0] = status[1] = false;
  return kSuccess;
}
int none() {
  return kSystemError;
}

template <class Function>
const void* address(Function* function) {
  return reinterpret_cast<const void*>(function);
}

}  // namespace

std::vector<StandIn> nvml() {
  return {
      {"_Z25ncclNvmlEnsureInitializedv", address(ensureInitialized)},
      {"_Z33ncclNvmlDeviceGetHandleByPciBusIdPKcPP13nvmlDevice_st", address(handleByBusId)},
      {"_Z22ncclNvmlDeviceGetIndexP13nvmlDevice_stPj", address(index)},
      {"_Z30ncclNvmlDeviceGetHandleByIndexjPP13nvmlDevice_st", address(handleByIndex)},
      {"_Z38ncclNvmlDeviceGetCudaComputeCapabilityP13nvmlDevice_stPiS1_", address(capability)},
      {"_Z19ncclNvmlGetCCStatusP16ncclNvmlCCStatus", address(confidential)},
      {"_Z26ncclNvmlDeviceGetP2PStatusP13nvmlDevice_stS0_24nvmlGpuP2PCapsIndex_"
       "enumP21nvmlGpuP2PStatus_enum",
       address(none)},
      {"_Z28ncclNvmlDeviceGetFieldValuesP13nvmlDevice_stiP17nvmlFieldValue_st", address(none)},
      {"_Z28ncclNvmlDeviceGetNvLinkStateP13nvmlDevice_stjP20nvmlEnableState_enum", address(none)},
      {"_Z29ncclNvmlDeviceGetPlatformInfoP13nvmlDevice_stP21nvmlPlatformInfo_v2_t", address(none)},
      {"_Z31ncclNvmlDeviceGetGpuFabricInfoVP13nvmlDevice_stP22nvmlGpuFabricInfo_v2_t",
       address(none)},
      {"_Z33ncclNvmlDeviceGetNvLinkCapabilityP13nvmlDevice_stj25nvmlNvLinkCapability_enumPj",
       address(none)},
      {"_Z36ncclNvmlDeviceGetNvLinkRemotePciInfoP13nvmlDevice_stjP14nvmlPciInfo_st", address(none)},
  };
}

}  // namespace torchft_ext::nccl_host
