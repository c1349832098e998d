// Learns that operations on the device are through, and completes them.
//
// An operation is watched from the moment its `end` event is recorded. It is complete when the
// event has fired before its communicator was closed, and no news of a failure had come from
// another member by then: success (that event may have fired because a kernel was stopped there,
// which is told before; see reap_batch.cpp); or when its generation has failed and the communicator
// has been cut: the generation's failure; or when its result check says that its generation must
// fail, and it does. What owns its buffers is kept until the event has fired in either case, so
// after an abort until the stream has drained; but callers' tensors only until a stream waits for a
// sound operation (device/tensor_shelf.h). Where NCCL was still at work on the call when the
// generation ended, that event proves nothing: they are kept until the communicator is at rest or
// gone, and then until an event that is recorded behind it has fired. Where the device cannot tell,
// they are kept for good.
//
// Never waits on the device, and asks it under relaxCapture(): safe beside a graph capture of
// another thread. Looks every 100 us while operations complete, down to every 2 ms while none does,
// at once when one is added, and sleeps while there is nothing to watch. Every 50 ms it asks busy
// communicators for asynchronous errors, and fails generations whose first operation on a stream
// has waited too long for a member that said goodbye. Nothing that goes wrong ends the thread.
//
// Owner: the process's NCCL threads. Threads: watch(), wake() from any, never block; everything
// else happens on "ft-events", which also releases keep_alive there. After stop(): what is watched
// is completed as failed where its generation is over, and otherwise left to its generation's end.
#pragma once

#include <c10/core/Event.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "base/threads.h"
#include "comm/op_state.h"
#include "comm/outstanding.h"
#include "nccl/device_comm.h"

namespace torchft_ext {

struct WatchedOp {
  std::shared_ptr<OpState> state;
  std::shared_ptr<DeviceComm> comm;
  c10::Stream stream;
  std::shared_ptr<c10::Event> begun;  // fired: what its caller had enqueued before is through
  std::shared_ptr<c10::Event> end;    // null only where interrupted
  std::shared_ptr<void> keep_alive;
  std::shared_ptr<Outstanding> outstanding;
  uint64_t number = 0;
  // NCCL was still at work on the call when the generation ended: the event alone proves nothing,
  // the communicator must be at rest too before the buffers are let go.
  bool interrupted = false;
  std::function<std::string()> result_check{};  // see StreamSide

  // The poller's own.
  std::shared_ptr<c10::Event>
      behind_all{};  // of an interrupted one, once its communicator is at rest
  LeaverGrace leavers{};
  std::shared_ptr<std::atomic<bool>> looked{};  // once fired: for what members told before
};

class EventPoller {
 public:
  EventPoller();
  ~EventPoller();  // must have been stopped

  void watch(WatchedOp op);
  void wake();  // a communicator was cut, or is gone
  bool stop(Deadline deadline);
  bool isSelf() const;  // the calling thread is "ft-events"

  struct Counts {
    int64_t watched = 0;   // not complete
    int64_t draining = 0;  // complete, buffers still held
  };
  Counts counts() const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  OwnedThread thread_;
};

}  // namespace torchft_ext
