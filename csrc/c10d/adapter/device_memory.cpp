#include "c10d/adapter/device_memory.h"

#include <atomic>

namespace torchft_ext {

at::Tensor viewOf(const Buffer& buffer, const c10::Device& device, at::ScalarType type) {
  const auto count = static_cast<int64_t>(buffer.bytes / c10::elementSize(type));
  return at::for_blob(buffer.data, {count})
      .options(at::TensorOptions().dtype(type).device(device))
      .target_device(device)
      .make_tensor();
}

at::Tensor sharedByte(c10::DeviceType device_type) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  at::Tensor byte = device_type == c10::kCUDA ? at::empty({}, options.pinned_memory(true))
                                              : at::empty({}, options.device(device_type));
  writeShared(byte, 0);
  return byte;
}

void writeShared(const at::Tensor& byte, uint8_t value) {
  std::atomic_ref(*static_cast<uint8_t*>(byte.mutable_data_ptr()))
      .store(value, std::memory_order_release);
}

uint8_t readShared(const at::Tensor& byte) {
  return std::atomic_ref(*static_cast<uint8_t*>(byte.mutable_data_ptr()))
      .load(std::memory_order_acquire);
}

}  // namespace torchft_ext
