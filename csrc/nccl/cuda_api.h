// What c10's device-generic streams, events and guards lack, and the NCCL engine needs. Two
// implementations: the CUDA runtime, found at run time, and the simulator of tests/sim.
//
// Threads: any. Nothing here blocks. native() and capturing() throw c10::Error where the device
// itself fails; nothing else throws.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <string>
#include <variant>

#include "device/device_ipc.h"
#include "device/relaxed_capture.h"
#include "nccl/nccl_types.h"

namespace torchft_ext {

class CudaApi {
 public:
  virtual ~CudaApi() = default;

  // cudaStream_t of a c10 stream.
  virtual NativeStream native(const c10::Stream& stream) const = 0;
  // Whether a graph is being captured on it. False where that cannot be asked.
  virtual bool capturing(const c10::Stream& stream) const = 0;

  // By cudaThreadExchangeStreamCaptureMode, relaxed.
  using RelaxedCapture = torchft_ext::RelaxedCapture;
  virtual std::unique_ptr<RelaxedCapture> relaxCapture() const = 0;

  // What lends memory to other processes; or why there is none. May load the driver's library.
  virtual std::variant<std::shared_ptr<DeviceIpc>, std::string> ipc() const = 0;
};

}  // namespace torchft_ext
