// Memory of devices as ATen sees it: views of an operation's buffers, and single bytes that host
// and device share. Any thread.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "comm/operation.h"

namespace torchft_ext {

// One-dimensional, of as many whole elements as there are; keeps nothing alive.
at::Tensor viewOf(const Buffer& buffer, const c10::Device& device, at::ScalarType type);

// A 0-dim uint8 tensor that the host reads and writes by the next two, and streams by copy_(): of a
// CUDA device, pinned host memory; the memory of other devices (a simulated one) is taken to be the
// host's. Zero.
at::Tensor sharedByte(c10::DeviceType device_type);
void writeShared(const at::Tensor& byte, uint8_t value);
uint8_t readShared(const at::Tensor& byte);

}  // namespace torchft_ext
