// Ends NCCL communicators. An abort may wait for kernels to exit, for a graph that captured it, or
// for ever: so it happens on a helper thread, nobody waits for it without a limit, and a helper
// that does not come back is reported, counted as stuck and left to itself.
//
// All communicators handed over at a time go together: those that are quiet are revoked before any
// is aborted (where NCCL can revoke), and all are aborted in one group, since aborts one after the
// other wait for each other's kernels. A batch never waits for the one before it. One that a CUDA
// graph may have captured goes alone: its replays exit at once, but NCCL frees it only when the
// graph is gone, and a helper waits for that as long as it takes, counted in held_by_graphs. A
// blocking one in which a caller waits goes alone too: it is told to stop at once, and freed when
// that one has left.
//
// Owner: the process's NCCL threads; everyone shares it. Threads: abort() and retire() from any,
// never block. The reaper's own ("ft-nccl-reaper") starts and joins the helpers ("ft-nccl-abort").
// After stop(): what is handed over is closed and kept as it is, and counted.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/threads.h"
#include "nccl/device_comm.h"

namespace torchft_ext {

struct ReaperCounts {
  int64_t live = 0;            // communicators handed over and not gone yet
  int64_t aborted = 0;         // gone after a failure
  int64_t retired = 0;         // gone after a goodbye
  int64_t stuck = 0;           // batches that did not end within their limit, or had to leave one
                               // as it is since a call into NCCL did not return; ever
  int64_t held_by_graphs = 0;  // told to stop, and not gone before the graph that captured them is
};

class CommReaper {
 public:
  using Comms = std::vector<std::shared_ptr<DeviceComm>>;

  // on_cut: called on helpers when communicators have been cut or are gone. limit: of one batch.
  CommReaper(std::function<void()> on_cut, Duration limit);
  ~CommReaper();  // must have been stopped

  void abort(Comms comms);
  // After a goodbye: finalize and destroy; what is not through by the deadline is aborted.
  void retire(Comms comms, Deadline deadline);

  // Waits until no communicator on that device is being ended, but those that are stuck or held by
  // graphs. False: not by the deadline.
  bool awaitEnded(c10::Device device, Deadline deadline) const;

  ReaperCounts counts() const;
  bool stop(Deadline deadline);  // false: a helper was left to itself

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  OwnedThread thread_;
};

}  // namespace torchft_ext
