// Behind what a generation's operations end, by stream: the last `end` that was recorded on each.
// So that a thread whose generation has failed can have its streams wait for kernels that are still
// on their way out, and may write until they are.
//
// Owner: the communicator and every launch. Threads: any.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "nccl/cuda_api.h"

namespace torchft_ext {

class StreamTails {
 public:
  void note(const c10::Stream& stream, std::shared_ptr<c10::Event> end);
  // The calling thread's current stream of each device concerned waits for all of them there, but
  // where a graph is being captured on it. Only enqueues; a device that refuses is logged.
  void blockCurrentStreams(const CudaApi& cuda) const;

 private:
  mutable Mutex mutex_;
  std::vector<std::pair<c10::Stream, std::shared_ptr<c10::Event>>> tails_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
