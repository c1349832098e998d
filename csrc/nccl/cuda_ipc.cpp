#include "nccl/cuda_ipc.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <cstring>
#include <utility>

#include "device/on_device.h"

namespace torchft_ext {
namespace {

constexpr const char* kDriver = "libcuda.so.1";  // loaded by whatever uses the device

using Entry = CudaIpcEntryPoints;

std::string textOf(const CudaIpcHandle& handle) {
  return {handle.reserved.data(), handle.reserved.size()};
}

CudaIpcHandle handleOf(const std::string& text) {
  CudaIpcHandle handle;
  TORCH_CHECK(text.size() == handle.reserved.size(), "a handle of ", text.size(), " bytes");
  std::memcpy(handle.reserved.data(), text.data(), text.size());
  return handle;
}

// What CUDA, and its driver, say of memory that has no handle.
bool cannotBeLent(int status) {
  constexpr int kInvalidValue = 1;
  constexpr int kNotSupported = 801;
  return status == kInvalidValue || status == kNotSupported;
}

// The runtime keeps the error for the next check of a kernel launch, of anyone's: it is taken away.
void check(const Entry& entry, int status, const char* call) {
  if (status == 0) return;
  entry.GetLastError();
  TORCH_CHECK(false, call, ": ", entry.GetErrorString(status));
}

c10::Device deviceAt(c10::DeviceIndex index) {
  return {c10::DeviceType::CUDA, index};
}

class CudaEvent final : public IpcEvent {
 public:
  CudaEvent(const Entry& entry, NativeStream (*stream_of)(const c10::Stream*),
            c10::DeviceIndex device, void* event)
      : entry_(entry), stream_of_(stream_of), device_(device), event_(event) {}
  ~CudaEvent() override {
    const OnDevice on_device(deviceAt(device_), std::nothrow);
    if (entry_.EventDestroy(event_) != 0) entry_.GetLastError();
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  std::string handle() const override {
    CudaIpcHandle handle;
    check(entry_, entry_.IpcGetEventHandle(&handle, event_), "cudaIpcGetEventHandle");
    return textOf(handle);
  }
  void record(const c10::Stream& stream) override {
    const OnDevice on_device(stream.device());
    check(entry_, entry_.EventRecord(event_, stream_of_(&stream)), "cudaEventRecord");
  }
  void block(const c10::Stream& stream) override {
    const OnDevice on_device(stream.device());
    check(entry_, entry_.StreamWaitEvent(stream_of_(&stream), event_, 0), "cudaStreamWaitEvent");
  }

 private:
  const Entry entry_;
  NativeStream (*const stream_of_)(const c10::Stream*);
  const c10::DeviceIndex device_;
  void* const event_;
};

class CudaIpc final : public DeviceIpc {
 public:
  CudaIpc(const Entry& entry, NativeStream (*stream_of)(const c10::Stream*))
      : entry_(entry), stream_of_(stream_of) {}

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }

  bool capturing(const c10::Stream& stream) const override {
    const OnDevice on_device(stream.device());
    int status = 0;
    if (entry_.StreamIsCapturing(stream_of_(&stream), &status) == 0) return status != 0;
    entry_.GetLastError();
    return false;
  }

  // torch's allocator gives parts of what it has allocated: the handle is that of the whole.
  IpcMemory memoryAt(const void* inside, c10::DeviceIndex device) const override {
    const OnDevice on_device(deviceAt(device));
    // Also where it is the current one: the driver's function wants a context in this thread, and
    // OnDevice sets none then.
    check(entry_, entry_.SetDevice(device), "cudaSetDevice");
    IpcMemory memory;
    const int found =
        entry_.MemGetAddressRange(&memory.base, &memory.bytes, reinterpret_cast<uintptr_t>(inside));
    TORCH_CHECK_VALUE(!cannotBeLent(found), "cuMemGetAddressRange: error ", found);
    TORCH_CHECK(found == 0, "cuMemGetAddressRange: error ", found);
    CudaIpcHandle handle;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): what the driver told
    void* const base = reinterpret_cast<void*>(memory.base);
    const int got = entry_.IpcGetMemHandle(&handle, base);
    if (cannotBeLent(got)) entry_.GetLastError();
    TORCH_CHECK_VALUE(!cannotBeLent(got), "cudaIpcGetMemHandle: ", entry_.GetErrorString(got));
    check(entry_, got, "cudaIpcGetMemHandle");
    memory.handle = textOf(handle);
    return memory;
  }

  std::shared_ptr<void> openMemory(const IpcMemory& memory,
                                   c10::DeviceIndex device) const override {
    const OnDevice on_device(deviceAt(device));
    void* base = nullptr;
    check(entry_,
          entry_.IpcOpenMemHandle(&base, handleOf(memory.handle), kCudaLazyEnablePeerAccess),
          "cudaIpcOpenMemHandle");
    return {base, [entry = entry_, device](void* opened) {
              const OnDevice there(deviceAt(device), std::nothrow);
              if (entry.IpcCloseMemHandle(opened) != 0) entry.GetLastError();
            }};
  }

  std::shared_ptr<IpcEvent> makeEvent(c10::DeviceIndex device) const override {
    const OnDevice on_device(deviceAt(device));
    void* event = nullptr;
    check(entry_,
          entry_.EventCreateWithFlags(&event, kCudaEventDisableTiming | kCudaEventInterprocess),
          "cudaEventCreateWithFlags");
    return std::make_shared<CudaEvent>(entry_, stream_of_, device, event);
  }

  std::shared_ptr<IpcEvent> openEvent(const std::string& handle,
                                      c10::DeviceIndex device) const override {
    const OnDevice on_device(deviceAt(device));
    void* event = nullptr;
    check(entry_, entry_.IpcOpenEventHandle(&event, handleOf(handle)), "cudaIpcOpenEventHandle");
    return std::make_shared<CudaEvent>(entry_, stream_of_, device, event);
  }

 private:
  const Entry entry_;
  NativeStream (*const stream_of_)(const c10::Stream*);
};

// False: there is none of that name.
template <typename Function>
bool lookUp(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  return function != nullptr;
}

// The name of one that lacks; empty: none does.
std::string lookUpRuntime(void* library, Entry& entry) {
#define TFT_LOOK_UP(name) \
  if (!lookUp(library, "cuda" #name, entry.name)) return "cuda" #name
  TFT_LOOK_UP(IpcGetMemHandle);
  TFT_LOOK_UP(IpcOpenMemHandle);
  TFT_LOOK_UP(IpcCloseMemHandle);
  TFT_LOOK_UP(IpcGetEventHandle);
  TFT_LOOK_UP(IpcOpenEventHandle);
  TFT_LOOK_UP(EventCreateWithFlags);
  TFT_LOOK_UP(EventRecord);
  TFT_LOOK_UP(EventDestroy);
  TFT_LOOK_UP(StreamWaitEvent);
  TFT_LOOK_UP(StreamIsCapturing);
  TFT_LOOK_UP(SetDevice);
  TFT_LOOK_UP(GetLastError);
  TFT_LOOK_UP(GetErrorString);
#undef TFT_LOOK_UP
  return {};
}

}  // namespace

std::variant<std::shared_ptr<DeviceIpc>, std::string> loadCudaIpc(
    void* library, NativeStream (*stream_of)(const c10::Stream*)) {
  Entry entry;
  if (const std::string missing = lookUpRuntime(library, entry); !missing.empty())
    return "the CUDA runtime under torch's libc10_cuda.so lacks " + missing;
  // The handle is never closed: the driver stays until the process ends.
  void* driver = ::dlopen(kDriver, RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return std::string("there is no CUDA driver (") + kDriver + ")";
  if (!lookUp(driver, "cuMemGetAddressRange_v2", entry.MemGetAddressRange))
    return std::string(kDriver) + " lacks cuMemGetAddressRange_v2";
  return std::shared_ptr<DeviceIpc>(std::make_shared<CudaIpc>(entry, stream_of));
}

}  // namespace torchft_ext
