// The simulated device: PrivateUse1 for torch ("privateuseone:0" and on), host memory, streams that
// threads work off. Loading the library registers guard, allocator, hooks and kernels.
//
// TORCHFT_EXT_SIM_DEVICES says how many devices there are (default 4, at most 16). Memory is given
// back in the order of the stream on which it was allocated, as by CUDA's caching allocator: a task
// on another stream that still uses it then is a violation, and touches nothing. exit() ends it, as
// it unloads a real device's runtime: every call is refused from then on.
//
// Threads: any. Current device and current streams are per thread.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "sim_stream.h"

namespace torchft_ext::sim {

inline constexpr int kMaxDevices = 16;
int deviceCount();
int currentDevice();
// One more of "NAME on DEVICE", the thread's: on a real one, what makes a context there.
void countOnCurrentDevice(const char* name);
void setCurrentDevice(int device);

SimStream& streamOf(const c10::Stream& stream);
SimStream& currentStream(int device);
SimStream& currentStream();
// Blocks until all streams of the device are idle; what their tasks enqueue meanwhile included.
void synchronizeDevice(int device);

// Keeps device memory from being freed while a task uses it. ok(): it was alive.
class Pin {
 public:
  Pin(const void* data, size_t bytes, const char* user);
  ~Pin();
  Pin(Pin&& other) noexcept : block_(std::exchange(other.block_, 0)), ok_(other.ok_) {}
  Pin(const Pin&) = delete;
  bool ok() const { return ok_; }

 private:
  uintptr_t block_ = 0;
  bool ok_ = false;
};
size_t liveAllocations();
// Whether what is allocated from now on can be lent to other processes (sim_segments.h).
void shareMemory(bool share = true);
// Memory of another process, mapped here, that tasks may use from now on; not any more.
void addForeignMemory(void* data, size_t bytes, int device);
void removeForeignMemory(void* data);
bool isDeviceMemory(const void* inside);

// A task that its stream stops at until it is opened: work that does not end by itself.
class Gate {
 public:
  void open();
  void await();  // blocks

 private:
  Mutex mutex_;
  CondVar opened_;
  bool open_ GUARDED_BY(mutex_) = false;
};
std::shared_ptr<Gate> stall(const c10::Stream& stream);

}  // namespace torchft_ext::sim
