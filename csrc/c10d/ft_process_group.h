// The group object that users hold when "ft" is its only backend: rank and size follow the epoch,
// which torch's own class fixes at construction (before 2.14).
//
// Owner: torch's tables and the user. Threads: any. After abort or destruction: as its one backend.
// It never blocks by itself.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "c10d/ft_backend.h"

namespace torchft_ext {

class FtProcessGroup : public c10d::ProcessGroup {
 public:
  // Serves every device type by this backend.
  FtProcessGroup(const c10::intrusive_ptr<c10d::Store>& store,
                 c10::intrusive_ptr<FtBackend> backend,
                 const std::vector<c10::DeviceType>& devices);

  const c10::intrusive_ptr<FtBackend>& backend() const { return backend_; }
  int getRank() const override { return backend_->currentRank(); }
  int getSize() const override { return backend_->currentSize(); }
  const std::string getBackendName() const override { return backend_->getBackendName(); }

 private:
  const c10::intrusive_ptr<FtBackend> backend_;
};

}  // namespace torchft_ext
