// The simulated NCCL: real data between threads and processes, and the real one's bad habits.
//
// As the real library: init is in progress until every rank has
// come; a rank that died, froze or never comes leaves the others' operations hanging on their
// streams until revoke or abort; abort raises its flag at once, and cleans up only when every
// operation already enqueued has started and ended (at the outermost groupEnd inside a group) and
// no graph that captured the communicator is alive; destroy waits for what is enqueued. Where a
// fault says so (sim_faults.h), calls are slow, stuck, failing or in progress: an operation is then
// enqueued only when asyncError() has said that it is no longer.
//
// On a blocking communicator nothing is in progress: calls, and a group's end, return when that is
// so, or when another thread has aborted it, in a group of its own whose end frees it.
//
// Misuse is a violation: a call on a communicator that is in progress, revoked, failed, aborted or
// gone (but for those allowed); two threads in one communicator at once; finalize or destroy after
// a failure; destroy or abort's clean-up where NCCL forbids it; what sim_registrations.h says;
// memory that is not alive; ranks out of step; a communicator that is freed while a call is inside;
// blocking and non-blocking ones in one group. A group's operations must share one stream for each
// communicator.
//
// Owner: the process. Threads: as NcclApi says.
#pragma once

#include <memory>

#include "nccl/nccl_api.h"

namespace torchft_ext::sim {

std::shared_ptr<NcclApi> makeSimNccl();

struct NcclSnapshot {
  int communicators = 0;
  int roots = 0;     // of unique ids whose ranks have not all come
  int captured = 0;  // communicators held by live graphs
};
NcclSnapshot ncclSnapshot();
// Of tests in which one is left as it is for good.
void forgetCommunicators();

}  // namespace torchft_ext::sim
