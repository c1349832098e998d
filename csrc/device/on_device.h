// Sets the calling thread's device, and puts back the one before. Owner: the stack.
#pragma once

#include <c10/core/Device.h>

#include <new>

namespace torchft_ext {

class OnDevice {
 public:
  explicit OnDevice(c10::Device device);
  // Where it cannot be set, what is asked there next says so.
  OnDevice(c10::Device device, std::nothrow_t) noexcept;
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::Device before_;
};

}  // namespace torchft_ext
