#include "host/local_step.h"

#include <cstring>

#include "host/reduce.h"

namespace torchft_ext {

void runLocalStep(const Step& step, const Operation& operation, int size) {
  switch (step.kind) {
    case Step::Kind::kCopy:
      std::memcpy(step.data, step.from, step.bytes);
      return;
    case Step::Kind::kReduce:
      reduceInto(step.data, step.from, step.bytes, operation.dtype, operation.reduce);
      return;
    case Step::Kind::kScale:
      multiplyInto(step.data, step.from, step.bytes, operation.dtype, operation.factor.data());
      return;
    case Step::Kind::kAverage:
      divideBy(step.data, step.bytes, operation.dtype, size);
      return;
    case Step::Kind::kSend:
    case Step::Kind::kRecv:
    case Step::Kind::kRecvReduce:
      return;  // not local
  }
}

void reduceReceived(const Step& step, const uint8_t* received, const Operation& operation) {
  reduceInto(step.data, received, step.bytes, operation.dtype, operation.reduce);
}

}  // namespace torchft_ext
