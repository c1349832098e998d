// CUDA's memory and events between processes, over a stand-in for its runtime and driver: on which
// device each call is made, in whichever thread.
#include "nccl/cuda_ipc.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <thread>

namespace torchft_ext {
namespace {

constexpr c10::DeviceIndex kElsewhere = 1;  // threads begin on 0

class Stub {
 public:
  Stub() : library_(::dlopen(TFT_CUDA_IPC_STUB, RTLD_NOW | RTLD_LOCAL)) {
    EXPECT_NE(library_, nullptr) << ::dlerror();
  }
  void* library() const { return library_; }
  std::string calls() const { return function<const char*()>("stubCalls")(); }
  int device() const { return function<int()>("stubDevice")(); }
  void setDevice(int index) const { function<void(int)>("stubSetDevice")(index); }

 private:
  template <typename Signature>
  Signature* function(const char* name) const {
    return reinterpret_cast<Signature*>(::dlsym(library_, name));
  }

  void* const library_;
};

const Stub& stub() {
  static const auto* const only = new Stub;
  return *only;
}

// torch's for CUDA, which this torch may lack: it calls nothing where the device is the current
// one.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    stub().setDevice(device.index());
    return before;
  }
  c10::Device getDevice() const override {
    return {type(), static_cast<c10::DeviceIndex>(stub().device())};
  }
  void setDevice(c10::Device device) const override { stub().setDevice(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    stub().setDevice(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
};

class CudaIpcTest : public ::testing::Test {
 protected:
  CudaIpcTest() {
    static const auto* const guard = new Guard;
    static const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, guard);
    auto loaded = loadCudaIpc(stub().library(), [](const c10::Stream*) { return NativeStream(); });
    if (const auto* problem = std::get_if<std::string>(&loaded)) {
      ADD_FAILURE() << *problem;
    } else {
      ipc_ = std::get<std::shared_ptr<DeviceIpc>>(std::move(loaded));
    }
    stub().calls();
  }

  // In a thread of its own, which has called CUDA never before, and is on device 0 afterwards.
  template <typename Body>
  void expectCalls(const std::string& expected, Body body) {
    int device = -1;
    std::thread([&] {
      body();
      device = stub().device();
    }).join();
    EXPECT_EQ(stub().calls(), expected);
    EXPECT_EQ(device, 0);
  }

  static c10::Stream streamElsewhere() {
    return c10::Stream(c10::Stream::DEFAULT, {c10::DeviceType::CUDA, kElsewhere});
  }

  std::shared_ptr<DeviceIpc> ipc_;
};

TEST_F(CudaIpcTest, LendsAndOpensMemoryOnItsDevice) {
  IpcMemory memory;
  expectCalls("MemGetAddressRange on 1;IpcGetMemHandle on 1;",
              [&] { memory = ipc_->memoryAt(&memory, kElsewhere); });
  std::shared_ptr<void> opened;
  expectCalls("IpcOpenMemHandle on 1;", [&] { opened = ipc_->openMemory(memory, kElsewhere); });
  expectCalls("IpcCloseMemHandle on 1;", [&] { opened.reset(); });
}

// The driver's function says that there is none, where the runtime would make one.
TEST_F(CudaIpcTest, LendsMemoryOfTheCurrentDeviceInAThreadWithoutAContext) {
  const int inside = 0;
  expectCalls("MemGetAddressRange on 0;IpcGetMemHandle on 0;",
              [&] { EXPECT_NO_THROW(ipc_->memoryAt(&inside, 0)); });
}

TEST_F(CudaIpcTest, MakesOpensUsesAndEndsEventsOnTheirDevice) {
  std::shared_ptr<IpcEvent> event;
  expectCalls("EventCreateWithFlags on 1;", [&] { event = ipc_->makeEvent(kElsewhere); });
  expectCalls("EventRecord on 1;", [&] { event->record(streamElsewhere()); });
  std::shared_ptr<IpcEvent> opened;
  expectCalls("IpcGetEventHandle on 0;IpcOpenEventHandle on 1;",
              [&] { opened = ipc_->openEvent(event->handle(), kElsewhere); });
  expectCalls("StreamWaitEvent on 1;", [&] { opened->block(streamElsewhere()); });
  expectCalls("EventDestroy on 1;", [&] { opened.reset(); });
  expectCalls("EventDestroy on 1;", [&] { event.reset(); });
  expectCalls("StreamIsCapturing on 1;", [&] { EXPECT_FALSE(ipc_->capturing(streamElsewhere())); });
}

}  // namespace
}  // namespace torchft_ext
