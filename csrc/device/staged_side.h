// What takes an operation on device tensors through host memory: its copies, made by c10d/, and run
// by the engine for such operations (staged/).
//
// Owner: the operation until its engine has it, then the engine. Threads: one at a time. Nothing
// here blocks: the functions enqueue on the stream that they are given. They may throw c10::Error
// and std::bad_alloc.
#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <string>
#include <vector>

#include "comm/operation.h"

namespace torchft_ext {

struct StagedSide : DeviceSide {
  explicit StagedSide(const c10::Stream& current) : current(current) {}

  // The caller's, at issue. Before its work until then is done nothing reads the tensors, and
  // nothing writes into them.
  const c10::Stream current;
  // The device memory that the operation reads and writes: of strided tensors all that they span.
  std::vector<Buffer> reads;
  std::vector<Buffer> writes;

  // In this order, each once at most:
  // Puts host memory, which it keeps from then on, in the place of the operation's buffers.
  std::function<void(Operation&)> allocate;
  // Copies there what the operation reads. Not called where `reads` is empty, nor is the next.
  std::function<void(const c10::Stream&)> load;
  // Those copies are done. Completes the operation; returns why its generation must fail, or
  // nothing.
  std::function<std::string(Operation&)> loaded;
  // Copies into the tensors what the operation has written. Not called where `writes` is empty.
  std::function<void(const c10::Stream&)> store;
};

}  // namespace torchft_ext
