// Which shapes of calls a communicator has made before, so that NCCL has connected what they need.
//
// Owner: a DeviceComm. Threads: its issuing thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_set>

namespace torchft_ext {

class KnownShapes {
 public:
  // Who has more is asked to wait beside again, now and then.
  static constexpr size_t kMost = 1024;

  bool holds(uint64_t shape) const { return shapes_.count(shape) > 0; }
  void add(uint64_t shape) {
    if (!shapes_.insert(shape).second) return;
    by_age_.push_back(shape);
    if (by_age_.size() <= kMost) return;
    shapes_.erase(by_age_.front());
    by_age_.pop_front();
  }

 private:
  std::unordered_set<uint64_t> shapes_;
  std::deque<uint64_t> by_age_;
};

}  // namespace torchft_ext
