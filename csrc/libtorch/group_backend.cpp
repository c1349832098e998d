#include "libtorch/group_backend.h"

#include <stdexcept>
#include <string>

#include "c10d/group/ft_process_group.h"

namespace torchft_ext {

using BackendPtr = c10::intrusive_ptr<FtBackend>;

BackendPtr backendIn(const ProcessGroupPtr& group) {
  if (!group) return {};
  if (const auto* own = dynamic_cast<const FtProcessGroup*>(group.get())) return own->backend();
  for (const c10::Device& device : group->getDeviceTypes()) {
    const auto backend = group->getBackend(device.type());
    if (auto* found = dynamic_cast<FtBackend*>(backend.get())) {
      return BackendPtr::reclaim_copy(found);
    }
  }
  return {};
}

BackendPtr backendOf(const char* caller, const ProcessGroupPtr& group) {
  if (auto backend = backendIn(group)) return backend;
  throw std::invalid_argument(std::string(caller) +
                              ": group: expected one of the backend 'ft', found " +
                              (group ? "'" + group->getBackendName() + "'" : "null"));
}

}  // namespace torchft_ext
