// Set the calling thread's device or stream, and put back the one before, but once exit() has begun
// (devices_end.h). Owner: the stack.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

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
  bool set_ = true;
};

// Its device too.
class OnStream {
 public:
  explicit OnStream(const c10::Stream& stream);
  ~OnStream();
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  const OnDevice on_device_;
  const c10::Stream before_;
};

}  // namespace torchft_ext
