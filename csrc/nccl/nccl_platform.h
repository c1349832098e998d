// The device, CUDA and NCCL of this process: the real ones, or a test's.
//
// Threads: any. The platform is found once, at first use, and kept until the process ends.
#pragma once

#include <c10/core/DeviceType.h>

#include <memory>
#include <string>
#include <variant>

#include "device/device_platform.h"
#include "nccl/cuda_api.h"
#include "nccl/nccl_api.h"

namespace torchft_ext {

struct NcclPlatform : DevicePlatform {
  c10::DeviceType type() const override { return device_type; }
  const char* library() const override { return "NCCL"; }
  std::string lacksToReduce(DType dtype) const override;
  bool capturing(const c10::Stream& stream) const override { return cuda->capturing(stream); }
  std::unique_ptr<RelaxedCapture> relaxCapture() const override { return cuda->relaxCapture(); }

  c10::DeviceType device_type = c10::DeviceType::CUDA;
  std::shared_ptr<NcclApi> nccl;
  std::shared_ptr<CudaApi> cuda;
};

// The platform, or why there is none: no CUDA in this torch, no device, no libnccl (where it was
// looked for), a version too old.
std::variant<std::shared_ptr<const NcclPlatform>, std::string> ncclPlatform();

// The device alone, for an engine that needs no library on it; or why there is none.
std::variant<std::shared_ptr<const DevicePlatform>, std::string> devicePlatform();

// Takes the place of the real one, for all engines made later.
void setNcclPlatformForTest(std::shared_ptr<const NcclPlatform> platform);

}  // namespace torchft_ext
