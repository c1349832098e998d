// A group of NCCL's calls on the calling thread. It ends with the scope at the latest: a group that
// stays open would swallow all later calls of that thread, which may be the user's.
#pragma once

#include "nccl/nccl_api.h"

namespace torchft_ext {

class NcclGroup {
 public:
  explicit NcclGroup(NcclApi& api) : api_(api), started_(api.groupStart()) {
    open_ = started_ == NcclResult::kSuccess;
  }
  ~NcclGroup() {
    if (open_) api_.groupEnd();
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // It stays open: only for a thread that makes no other call into NCCL and is about to end.
  void leaveOpen() { open_ = false; }

  NcclResult started() const { return started_; }
  NcclResult end() {
    open_ = false;
    return api_.groupEnd();
  }

 private:
  NcclApi& api_;
  const NcclResult started_;
  bool open_ = false;
};

}  // namespace torchft_ext
