// Device memory and events that another process of this machine uses: a group whose engine runs in
// a child process lends its tensors so (torchft_ext/_pg_lent.py), and the child opens them
// (device_child/).
//
// Two implementations: CUDA's (nccl/cuda_ipc.h) and the simulator's (tests/sim). Owner: shared by
// whoever asked the engine's kind for it. Threads: any. Nothing here waits for a stream; whether a
// driver does so as it unmaps memory is not known. Everything throws c10::Error where the device
// refuses; what destructors cannot undo they leave to the process's end.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace torchft_ext {

// A whole allocation, of which tensors have parts.
struct IpcMemory {
  uintptr_t base = 0;  // in the process that has allocated it
  size_t bytes = 0;
  std::string handle;  // for whoever opens it; another one once the memory was freed
};

// A point in a stream of one process that streams of another one wait for.
class IpcEvent {
 public:
  virtual ~IpcEvent() = default;
  // For openEvent() in another process.
  virtual std::string handle() const = 0;
  // Again: the last one counts, for whoever has a stream wait later on.
  virtual void record(const c10::Stream& stream) = 0;
  // The stream waits for what was recorded last, by any process. It waits for good where that one
  // has ended before it came there.
  virtual void block(const c10::Stream& stream) = 0;
};

class DeviceIpc {
 public:
  virtual ~DeviceIpc() = default;

  virtual c10::DeviceType type() const = 0;

  // Whether a graph is being captured on it. False where that cannot be asked.
  virtual bool capturing(const c10::Stream& stream) const = 0;

  // The allocation around an address of this process's memory. Throws c10::ValueError for memory
  // that cannot be lent: torch's expandable segments, managed memory.
  virtual IpcMemory memoryAt(const void* inside, c10::DeviceIndex device) const = 0;
  // Where the base of another process's allocation lies here; unmapped with the last owner, past
  // the last work that uses it.
  virtual std::shared_ptr<void> openMemory(const IpcMemory& memory,
                                           c10::DeviceIndex device) const = 0;

  virtual std::shared_ptr<IpcEvent> makeEvent(c10::DeviceIndex device) const = 0;
  virtual std::shared_ptr<IpcEvent> openEvent(const std::string& handle,
                                              c10::DeviceIndex device) const = 0;
};

}  // namespace torchft_ext
