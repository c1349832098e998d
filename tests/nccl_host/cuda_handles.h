// What the stand-ins share: CUDA's handles as the simulated device's objects, the last error, what
// a capture forbids, and the check of each stand-in's signature.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <type_traits>

#include "cuda_stand_in.h"
#include "sim_device.h"

namespace torchft_ext::nccl_host {

inline sim::SimStream& streamOf(cudaStream_t stream) {
  const auto number = reinterpret_cast<uintptr_t>(stream);
  if (number <= 2)
    return sim::streamOf(c10::Stream(
        c10::Stream::DEFAULT, c10::Device(c10::DeviceType::PrivateUse1,
                                          static_cast<c10::DeviceIndex>(sim::currentDevice()))));
  return *reinterpret_cast<sim::SimStream*>(stream);
}

using EventHandle = std::shared_ptr<sim::SimEvent>;
inline EventHandle& eventOf(cudaEvent_t event) {
  return *reinterpret_cast<EventHandle*>(event);
}

inline thread_local cudaError_t last_error = cudaSuccess;
inline cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

// A call that would spoil a capture that goes on anywhere in the process: a violation, unless this
// thread has relaxed its mode.
void notInCapture(const char* function);

template <class Function>
StandIn checked(const char* name, Function* theirs, Function* ours) {
  static_cast<void>(theirs);  // for its type alone
  return {name, reinterpret_cast<const void*>(ours)};
}
#define STAND_IN(name) \
  checked<std::remove_pointer_t<decltype(&::name)>>(#name, nullptr, &nccl_host::name)

}  // namespace torchft_ext::nccl_host
