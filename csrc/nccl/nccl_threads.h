// What all NCCL engines of a process share: the thread that watches events, the one that ends
// communicators, those of calls that may block, and the events.
//
// Owner: the process, and every communicator; made at first use. Threads: any.
#pragma once

#include <memory>

#include "device/event_pool.h"
#include "nccl/call_threads.h"
#include "nccl/comm_reaper.h"
#include "nccl/event_poller.h"

namespace torchft_ext {

struct NcclThreads {
  explicit NcclThreads(Duration abort_limit);
  const std::shared_ptr<EventPool> events;
  const std::shared_ptr<EventPoller> poller;
  const std::shared_ptr<CallThreads> calls;
  CommReaper reaper;
};

std::shared_ptr<NcclThreads> sharedNcclThreads();
// Ends them; the next use makes new ones. False: something was left to itself.
bool stopNcclThreads(Deadline deadline);
// Of the threads made later. Default: 10 s.
void setAbortLimitForTest(Duration limit);

}  // namespace torchft_ext
