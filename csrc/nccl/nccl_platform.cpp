#include "nccl/nccl_platform.h"

#include <utility>

#include "base/mutex.h"

namespace torchft_ext {
namespace {

Mutex platform_mutex;
std::shared_ptr<const NcclPlatform> test_platform GUARDED_BY(platform_mutex);

}  // namespace

std::variant<std::shared_ptr<const NcclPlatform>, std::string> ncclPlatform() {
  MutexLock lock(platform_mutex);
  if (test_platform) return test_platform;
  return "this build of torchft_ext has no NCCL";
}

void setNcclPlatformForTest(std::shared_ptr<const NcclPlatform> platform) {
  MutexLock lock(platform_mutex);
  test_platform = std::move(platform);
}

}  // namespace torchft_ext
