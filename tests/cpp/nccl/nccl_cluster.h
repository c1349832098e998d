// Members whose groups run the NCCL engine on the simulated device: rank i on device i.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpp/comm/cluster.h"
#include "cpp/support/wait_for.h"
#include "device/stream_side.h"
#include "nccl/device_comm.h"
#include "nccl/nccl_engine.h"
#include "nccl/nccl_threads.h"
#include "sim.h"

namespace torchft_ext {

inline c10::Device deviceOf(int member) {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(member % sim::deviceCount())};
}
inline c10::Stream currentOn(c10::Device device) {
  return c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
}
inline c10::Stream anotherOn(c10::Device device) {
  return c10::impl::getDeviceGuardImpl(device.type())->getStreamFromGlobalPool(device);
}

// Values in device memory. Written and read by the test while no stream uses them.
template <typename T>
class DeviceArray {
 public:
  DeviceArray(c10::Device device, const std::vector<T>& values)
      : device_(device), count_(values.size()) {
    const OnDevice on_device(device);
    memory_ = c10::GetAllocator(device.type())->allocate(std::max<size_t>(1, count_ * sizeof(T)));
    std::copy(values.begin(), values.end(), data());
  }
  c10::Device device() const { return device_; }
  T* data() const { return static_cast<T*>(memory_.get()); }
  Buffer all() const { return part(0, count_); }
  Buffer part(size_t first, size_t count) const {
    return {reinterpret_cast<uint8_t*>(data() + first), count * sizeof(T)};
  }
  std::vector<T> read() const { return {data(), data() + count_}; }

 private:
  c10::Device device_;
  size_t count_;
  c10::DataPtr memory_;
};
using Floats = std::shared_ptr<DeviceArray<float>>;

inline Floats floats(int member, const std::vector<float>& values) {
  return std::make_shared<DeviceArray<float>>(deviceOf(member), values);
}

// `owners` are kept until the operation is through.
inline Operation onDevice(Operation operation, const std::vector<Floats>& owners,
                          c10::Device device) {
  operation.dtype = DType::kFloat;
  operation.device = std::make_shared<StreamSide>(currentOn(device));
  operation.keep_alive = std::make_shared<std::vector<Floats>>(owners);
  return operation;
}
inline StreamSide& sideOf(const Operation& operation) {
  return static_cast<StreamSide&>(*operation.device);
}

inline Operation deviceAllreduce(const Floats& values, ReduceKind reduce = ReduceKind::kSum) {
  Operation operation;
  operation.kind = OpKind::kAllreduce;
  operation.reduce = reduce;
  operation.outputs = {values->all()};
  return onDevice(operation, {values}, values->device());
}
inline Operation deviceSend(const Floats& values, int peer) {
  Operation operation;
  operation.kind = OpKind::kSend;
  operation.peer = peer;
  operation.inputs = {values->all()};
  return onDevice(operation, {values}, values->device());
}
inline Operation deviceRecv(const Floats& values, int peer) {
  Operation operation;
  operation.kind = OpKind::kRecv;
  operation.peer = peer;
  operation.outputs = {values->all()};
  return onDevice(operation, {values}, values->device());
}

// Suites run twice: with non-blocking communicators, and with blocking ones where this is 1.
inline bool blockingCalls() {
  const char* asked = std::getenv("TORCHFT_EXT_NCCL_BLOCKING");
  return asked != nullptr && std::string(asked) == "1";
}

class NcclCluster : public Cluster {
 public:
  explicit NcclCluster(int size, NcclEngineOptions options = {})
      : Cluster(size, loopbackOptions(), [options](std::shared_ptr<Engine> host) mutable {
          options.blocking_calls = options.blocking_calls || blockingCalls();
          return makeNcclEngine(sim::platform(), std::move(host), options);
        }) {}
};

// Each test begins without faults, and ends without misuse of the library and without
// communicators.
class NcclTest : public testing::Test {
 protected:
  void SetUp() override { sim::Faults::instance().reset(); }
  void TearDown() override {
    inject("clear");
    EXPECT_TRUE(waitFor([] { return sim::ncclSnapshot().communicators == 0; }))
        << sim::ncclSnapshot().communicators << " communicators are left";
    EXPECT_EQ(sim::Faults::instance().violations(), std::vector<std::string>());
    EXPECT_TRUE(stopNcclEngines(testDeadline()) || allow_stuck);
  }
  static void inject(const std::string& line) { sim::Faults::instance().inject(line); }
  static int64_t counted(const std::string& name) { return sim::Faults::instance().counted(name); }

  bool allow_stuck = false;
};

}  // namespace torchft_ext
