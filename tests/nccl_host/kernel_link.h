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

// Either end of it.
class Link {
 public:
  Link(Connection& connection, Steps steps, const volatile uint32_t* abort_flag);
  Link(const Link&) = delete;

 protected:
  ~Link();
  // Where the next slice lies, once the other end's counter and `ahead` steps more cover it.
  char* wait(const uint64_t* counter, uint64_t ahead, size_t bytes);
  void post(uint64_t* counter);

  Connection& connection_;
  uint64_t step_;

 private:
  const Steps steps_;
  const volatile uint32_t* abort_flag_;
};

class SendLink : Link {
 public:
  using Link::Link;
  // Where the next slice goes, once there is room. Throws Aborted.
  char* wait(size_t bytes) { return Link::wait(connection_.head, kSteps, bytes); }
  void post() { Link::post(connection_.tail); }  // it is there
};

class RecvLink : Link {
 public:
  RecvLink(Connection& connection, Steps steps, const volatile uint32_t* abort_flag);
  // Where the next slice is, once it is there. Throws Aborted.
  const char* wait(size_t bytes) { return Link::wait(connection_.tail, 0, bytes); }
  void post() { Link::post(connection_.head); }  // it was read
};

}  // namespace torchft_ext::nccl_host
