// By what all ranks know an operation of a generation: its place in the threads' order, or its name
// where a callback issued it.
//
// Owner: a generation. Threads: one at a time, in the order of issue.
#pragma once

#include <cstdint>
#include <memory>

#include "comm/lifecycle.h"
#include "comm/op_state.h"
#include "comm/operation.h"

namespace torchft_ext {

class OperationNumbering {
 public:
  // The state of an operation that is about to be issued, which is given its name if it has one.
  // Takes the next number, but for named ones.
  std::shared_ptr<OpState> stateOf(Operation& operation,
                                   const std::shared_ptr<Lifecycle>& lifecycle);

 private:
  int64_t next_seq_ = 1;      // as torch's own backends count
  uint64_t collectives_ = 0;  // of the threads, on host memory: counted alike on all ranks
};

}  // namespace torchft_ext
