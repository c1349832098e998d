// The device of an engine, as the layer of tensors asks it: which tensors it serves, and what c10's
// device-generic streams lack.
//
// Owner: shared by the engine and everything that serves its tensors. Threads: any; immutable.
// Nothing here blocks. capturing() throws c10::Error where the device itself fails; nothing else
// throws.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>

#include <memory>
#include <string>

#include "comm/operation.h"
#include "device/relaxed_capture.h"

namespace torchft_ext {

class DevicePlatform {
 public:
  virtual ~DevicePlatform() = default;

  // Of the tensors that are served.
  virtual c10::DeviceType type() const = 0;
  // What errors call the library that reduces: "NCCL".
  virtual const char* library() const = 0;
  // What it would need to reduce items of this type, as an error says it: "NCCL 2.24 or later,
  // found ...". Empty: nothing. Asked about types that such libraries know.
  virtual std::string lacksToReduce(DType dtype) const = 0;

  // Whether a graph is being captured on the stream. False where that cannot be asked.
  virtual bool capturing(const c10::Stream& stream) const = 0;
  virtual std::unique_ptr<RelaxedCapture> relaxCapture() const = 0;
};

}  // namespace torchft_ext
