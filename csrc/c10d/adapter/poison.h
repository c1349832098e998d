// Options(poison=True): an operation of a failed generation leaves NaN in its outputs, in stream
// order, so that kernels which run on incomplete results cannot go unnoticed.
//
// Every byte becomes 0xff, whatever the dtype: NaN for floating point and complex numbers, -1 for
// signed integers, the largest value for unsigned ones, true for bool. How: each generation has one
// byte of host memory that devices can read. Behind each operation its stream copies that byte and
// fills the outputs where it is set. The generation's failure sets it before any stream is freed:
// so what the device finds unset was complete.
//
// Owner: the backend, and its group's generations. Threads: any. It never blocks, but that byte's
// making may wait for the device.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "comm/lifecycle.h"
#include "comm/operation.h"

namespace torchft_ext {

class Poison {
 public:
  explicit Poison(c10::DeviceType device_type) : device_type_(device_type) {}

  // The generation's first subscriber, so that it hears of a failure before the engine does.
  void begin(const std::shared_ptr<Lifecycle>& lifecycle);
  // The generation's byte, as a 0-dim uint8 tensor that host and devices can reach; undefined where
  // that generation is not the latest.
  at::Tensor flagOf(int64_t generation) const;

 private:
  // Of one generation. byte(): who issues; making it may wait for the device. set(): any thread,
  // and never waits.
  class Flag {
   public:
    at::Tensor byte(c10::DeviceType device_type);
    void set();

   private:
    Mutex mutex_;  // byte()'s alone
    at::Tensor byte_ GUARDED_BY(mutex_);
    std::atomic<uint8_t*> address_{nullptr};  // of byte_, once it has been made; which stays
    std::atomic<bool> set_{false};
  };

  const c10::DeviceType device_type_;
  mutable Mutex mutex_;
  std::weak_ptr<Lifecycle> latest_ GUARDED_BY(mutex_);
  std::shared_ptr<Flag> flag_ GUARDED_BY(mutex_);
};

// Enqueues on the current stream: where the flag is set, outputs become 0xff.
void enqueuePoison(const std::vector<Buffer>& outputs, const at::Tensor& flag,
                   const c10::Device& device);
// Enqueues on the current stream: of each byte of the outputs its lowest bit.
void enqueueLowBits(const std::vector<Buffer>& outputs, const c10::Device& device);

}  // namespace torchft_ext
