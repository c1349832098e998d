#include "c10d/ft_process_group.h"

#include <utility>

namespace torchft_ext {

FtProcessGroup::FtProcessGroup(const c10::intrusive_ptr<c10d::Store>& store,
                               c10::intrusive_ptr<FtBackend> backend,
                               const std::vector<c10::DeviceType>& devices)
    : c10d::ProcessGroup(store, backend->currentRank(), backend->currentSize()),
      backend_(std::move(backend)) {
  for (const c10::DeviceType device : devices) setBackend(device, BackendType::CUSTOM, backend_);
  setDefaultBackend(BackendType::CUSTOM);
}

}  // namespace torchft_ext
