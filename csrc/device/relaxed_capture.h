// While it lives, this thread's queries (event, stream) do not disturb a graph that another thread
// captures. Owner: the stack of whoever asked for it; ended on the same thread. Never blocks.
#pragma once

namespace torchft_ext {

class RelaxedCapture {
 public:
  virtual ~RelaxedCapture() = default;
};

}  // namespace torchft_ext
