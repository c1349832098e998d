// One direction of data between a kernel and its ring, a step at a time, as NCCL's Simple protocol
// moves it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device_layout.h"

namespace torchft_ext::nccl_host {

// What ends a kernel before its time: NCCL raised the communicator's flag.
struct Aborted {};

// `per_slice` steps are waited for and told of together; a connection's count of steps is a
// multiple of `per_chunk` where a kernel begins.
struct Steps {
  uint64_t per_slice = 1;
  uint64_t slices = 1;
};

class SendLink {
 public:
  SendLink(Connection& connection, Steps steps, const volatile uint32_t* abort_flag);
  ~SendLink();
  SendLink(const SendLink&) = delete;
  char* wait(size_t bytes);  // where the next slice goes, once there is room. Throws Aborted
  void post();               // it is there

 private:
  Connection& connection_;
  const Steps steps_;
  const volatile uint32_t* abort_flag_;
  uint64_t step_;
};

class RecvLink {
 public:
  RecvLink(Connection& connection, Steps steps, const volatile uint32_t* abort_flag);
  ~RecvLink();
  RecvLink(const RecvLink&) = delete;
  const char* wait(size_t bytes);  // where the next slice is, once it is there. Throws Aborted
  void post();                     // it was read

 private:
  Connection& connection_;
  const Steps steps_;
  const volatile uint32_t* abort_flag_;
  uint64_t step_;
};

}  // namespace torchft_ext::nccl_host
