#include "nccl/nccl_platform.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

#include "base/fork.h"
#include "base/mutex.h"
#include "nccl/cuda_runtime.h"
#include "nccl/nccl_library.h"

namespace torchft_ext {
namespace {

struct Found {
  Mutex mutex;
  std::shared_ptr<const NcclPlatform> platform GUARDED_BY(mutex);
};
PerProcess<Found> found;

using Platform = std::variant<std::shared_ptr<const NcclPlatform>, std::string>;

using Runtime = std::variant<std::shared_ptr<CudaApi>, std::string>;

// Of a CUDA device that is here.
Runtime findRuntime() {
  auto cuda = loadCudaRuntime();
  if (std::holds_alternative<std::string>(cuda)) return cuda;
  const auto* guard =
      c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].load();
  if (guard == nullptr) return std::string("this torch was built without CUDA");
  if (guard->deviceCount() == 0) return std::string("torch sees no CUDA device");
  return cuda;
}

Platform find() {
  auto cuda = findRuntime();
  if (auto* why = std::get_if<std::string>(&cuda)) return std::move(*why);
  auto nccl = loadNcclLibrary();
  if (auto* why = std::get_if<std::string>(&nccl)) return std::move(*why);
  auto platform = std::make_shared<NcclPlatform>();
  platform->nccl = std::get<std::shared_ptr<NcclApi>>(std::move(nccl));
  platform->cuda = std::get<std::shared_ptr<CudaApi>>(std::move(cuda));
  return std::shared_ptr<const NcclPlatform>(std::move(platform));
}

// Without a library that reduces there.
class CudaDevice : public DevicePlatform {
 public:
  explicit CudaDevice(std::shared_ptr<CudaApi> cuda) : cuda_(std::move(cuda)) {}
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  const char* library() const override { return "no library"; }
  std::string lacksToReduce(DType /*dtype*/) const override { return {}; }
  bool capturing(const c10::Stream& stream) const override { return cuda_->capturing(stream); }
  std::unique_ptr<RelaxedCapture> relaxCapture() const override { return cuda_->relaxCapture(); }

 private:
  const std::shared_ptr<CudaApi> cuda_;
};

// Null: not found yet.
std::shared_ptr<const NcclPlatform> kept() {
  MutexLock lock(found.get().mutex);
  return found.get().platform;
}

}  // namespace

std::string NcclPlatform::lacksToReduce(DType dtype) const {
  const bool float8 = dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
  if (!float8 || nccl->has(NcclFeature::kFloat8)) return {};
  return "NCCL 2.24 or later, found version " + std::to_string(nccl->version());
}

std::variant<std::shared_ptr<const NcclPlatform>, std::string> ncclPlatform() {
  if (auto before = kept()) return before;
  Platform searched = find();  // without the lock: it may load libraries
  if (auto* platform = std::get_if<std::shared_ptr<const NcclPlatform>>(&searched)) {
    MutexLock lock(found.get().mutex);
    auto& first = found.get().platform;
    if (!first) first = *platform;
    return first;
  }
  return searched;
}

std::variant<std::shared_ptr<const DevicePlatform>, std::string> devicePlatform() {
  if (auto before = kept()) return before;
  auto cuda = findRuntime();
  if (auto* why = std::get_if<std::string>(&cuda)) return std::move(*why);
  return std::make_shared<const CudaDevice>(std::get<std::shared_ptr<CudaApi>>(std::move(cuda)));
}

void setNcclPlatformForTest(std::shared_ptr<const NcclPlatform> platform) {
  Found& kept = found.get();
  MutexLock lock(kept.mutex);
  kept.platform.swap(platform);
}

}  // namespace torchft_ext
