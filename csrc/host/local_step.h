// What a schedule does in local memory: shared by whatever runs schedules.
#pragma once

#include "comm/operation.h"
#include "host/schedule.h"

namespace torchft_ext {

// A step without a peer: copy, reduce, scale, average.
void runLocalStep(const Step& step, const Operation& operation, int size);
// The end of a kRecvReduce: what the peer has sent is in `received`.
void reduceReceived(const Step& step, const uint8_t* received, const Operation& operation);

}  // namespace torchft_ext
