// Streams for communicators: while one has a stream, no other communicator of the process gets it.
//
// torch's pool hands its streams out in turn (32 for a device and priority), so after some
// generations two communicators would share one, and wait for each other. Here a stream that was
// given back is given out first, so that any number of generations needs no more than those that
// live at a time. Only where more live at a time than the pool has are streams shared. User code
// that takes streams from torch's pool may still be given one of them; one on which a graph is
// being captured now is not taken, as long as there is another.
//
// Owner: the process. A stream goes back with the last owner of what takeStream() returned, which
// must be past the last work enqueued there. Threads: any. Never blocks.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>

#include "nccl/cuda_api.h"

namespace torchft_ext {

std::shared_ptr<const c10::Stream> takeStream(const CudaApi& cuda, c10::Device device,
                                              bool high_priority);

}  // namespace torchft_ext
