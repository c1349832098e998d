// Device memory and events that another process may open, on the simulated device.
#include "device/device_ipc.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "cpp/nccl/nccl_cluster.h"
#include "engines/known_engines.h"
#include "sim_segments.h"

namespace torchft_ext {
namespace {

class DeviceIpcTest : public ::testing::Test {
 protected:
  DeviceIpcTest() {
    sim::install();
    sim::shareMemory();
  }
  ~DeviceIpcTest() override { EXPECT_TRUE(sim::Faults::instance().violations().empty()); }

  static std::shared_ptr<DeviceIpc> ipc() {
    return std::get<std::shared_ptr<DeviceIpc>>(engineRegistry().find("nccl")->ipc());
  }
  static IpcMemory around(const Floats& values) { return ipc()->memoryAt(values->data(), 0); }
};

TEST_F(DeviceIpcTest, TensorsOfOneAllocationAreLentByItsBase) {
  const Floats first = floats(0, {1, 2, 3});
  const Floats second = floats(0, {4, 5, 6});
  const IpcMemory memory = around(second);
  EXPECT_EQ(memory.base, around(first).base);
  EXPECT_EQ(memory.handle, around(first).handle);
  const auto opened = ipc()->openMemory(memory, 0);
  const size_t offset = reinterpret_cast<uintptr_t>(second->data()) - memory.base;
  auto* there = reinterpret_cast<float*>(static_cast<char*>(opened.get()) + offset);
  EXPECT_EQ(there[2], 6);
  there[0] = 7;
  EXPECT_EQ(second->read(), (std::vector<float>{7, 5, 6}));
}

TEST_F(DeviceIpcTest, MemoryThatWasFreedAndAllocatedAgainHasAnotherHandle) {
  Floats values = floats(3, {1});  // alone on its device
  const IpcMemory before = around(values);
  values.reset();
  values = floats(3, {2});
  EXPECT_NE(around(values).handle, before.handle);
  EXPECT_THROW(ipc()->openMemory(before, 3), c10::Error);
}

TEST_F(DeviceIpcTest, OpenedMemoryIsTheDevicesUntilItIsClosed) {
  const Floats values = floats(0, {1});
  auto opened = ipc()->openMemory(around(values), 0);
  void* const there = opened.get();
  EXPECT_TRUE(sim::isDeviceMemory(there));
  opened.reset();
  EXPECT_FALSE(sim::isDeviceMemory(there));
}

TEST_F(DeviceIpcTest, SegmentsGoWithTheLastOfWhatIsInThem) {
  const size_t before = sim::Segments::instance().live();
  std::vector<Floats> many;
  for (int i = 0; i < 20; ++i) many.push_back(floats(2, std::vector<float>(100'000)));
  EXPECT_GT(sim::Segments::instance().live(), before);
  many.clear();
  EXPECT_EQ(sim::Segments::instance().live(), before);
}

TEST_F(DeviceIpcTest, MemoryThatIsNotTheDevicesIsNotLent) {
  const int elsewhere = 0;
  EXPECT_THROW(ipc()->memoryAt(&elsewhere, 0), c10::Error);
}

TEST_F(DeviceIpcTest, StreamWaitsForAnEventOfAnotherStream) {
  const c10::Stream early = anotherOn(deviceOf(0));
  const c10::Stream late = anotherOn(deviceOf(0));
  const auto gate = sim::stall(early);
  const auto event = ipc()->makeEvent(0);
  event->record(early);
  const auto opened = ipc()->openEvent(event->handle(), 0);
  opened->block(late);
  std::atomic<bool> ran{false};
  sim::streamOf(late).enqueue([&] { ran = true; });
  EXPECT_FALSE(sim::streamOf(late).idle());
  EXPECT_FALSE(ran);
  gate->open();
  sim::streamOf(late).synchronize();
  EXPECT_TRUE(ran);
}

TEST_F(DeviceIpcTest, StreamDoesNotWaitForWhatIsRecordedLater) {
  const c10::Stream early = anotherOn(deviceOf(0));
  const c10::Stream late = anotherOn(deviceOf(0));
  const auto event = ipc()->makeEvent(0);
  event->record(early);
  sim::streamOf(early).synchronize();
  const auto opened = ipc()->openEvent(event->handle(), 0);
  opened->block(late);
  const auto gate = sim::stall(early);
  event->record(early);
  sim::streamOf(late).synchronize();
  gate->open();
}

}  // namespace
}  // namespace torchft_ext
