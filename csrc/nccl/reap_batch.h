// The communicators that one helper of the reaper ends, and how. See comm_reaper.h.
//
// Nobody may be inside of one that is aborted: NCCL frees it. But who waits for peers inside of a
// blocking one only leaves when the abort's flags are raised. So there abort() is called in a
// group, which raises the flags; and the group, at whose end NCCL frees, ends when the caller has
// left (NCCL 2.22.3 to 2.31, ncclCommAbort and groupLaunch).
//
// Owner: the reaper and the helper that runs it. Threads: run() on the helper; giveUp() on the
// reaper's when it takes too long.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "nccl/device_comm.h"

namespace torchft_ext {

class ReapBatch {
 public:
  using Comms = std::vector<std::shared_ptr<DeviceComm>>;
  enum class How { kAbort, kRetire };

  ReapBatch(Comms comms, How how, Deadline retire_by, Duration limit, std::function<void()> on_cut);

  void run();  // blocks in NCCL
  // A graph's end, or someone inside of a communicator, is waited for.
  bool mayTakeLong() const;
  void giveUp();  // releases those who wait for the cut, though NCCL may be at work still

  const Comms& comms() const { return comms_; }
  How how() const { return how_; }
  Deadline deadline() const { return deadline_; }

 private:
  Comms retire(const Comms& comms, Comms& finalized) const;
  void destroyAll(const Comms& comms) const;
  void tellMembers(const Comms& comms);
  void abortInside(const Comms& comms);
  bool tellInside(DeviceComm& comm) const;
  void abortAll(const Comms& comms);
  void abort(const Comms& comms);
  bool revoke(DeviceComm& comm) const;
  void tellToStop(DeviceComm& comm) const;
  void releaseRoots(const Comms& comms) const;

  const Comms comms_;
  const How how_;
  const Deadline retire_by_;
  const Deadline deadline_;
  const Deadline half_;  // for what comes first, where something may follow that takes time
  const std::function<void()> on_cut_;
  std::set<const Lifecycle*> told_;  // the helper's: of comms_, each once
};

}  // namespace torchft_ext
