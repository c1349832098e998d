#include "c10d/adapter/poison.h"

#include "c10d/adapter/device_memory.h"

namespace torchft_ext {
namespace {

// Wider elements where the memory allows it: a quarter of the work.
at::ScalarType widestFor(const Buffer& buffer) {
  const auto address = reinterpret_cast<uintptr_t>(buffer.data);
  return address % 4 == 0 && buffer.bytes % 4 == 0 ? at::kInt : at::kByte;
}

}  // namespace

void Poison::begin(const std::shared_ptr<Lifecycle>& lifecycle) {
  const auto flag = std::make_shared<Flag>();
  lifecycle->subscribe([flag](const FailurePtr&) { flag->set(); });
  const MutexLock lock(mutex_);
  flag_ = flag;
  latest_ = lifecycle;
}

at::Tensor Poison::flagOf(int64_t generation) const {
  std::shared_ptr<Flag> flag;
  {
    const MutexLock lock(mutex_);
    const auto lifecycle = latest_.lock();
    if (lifecycle && lifecycle->identity().generation == generation) flag = flag_;
  }
  return flag ? flag->byte(device_type_) : at::Tensor();
}

// By the first operation, on its device: pinned memory that is made before any context is there
// makes one, on the first device.
at::Tensor Poison::Flag::byte(c10::DeviceType device_type) {
  const MutexLock lock(mutex_);
  if (!byte_.defined()) {
    byte_ = sharedByte(device_type);
    address_ = static_cast<uint8_t*>(byte_.mutable_data_ptr());
    if (set_) writeShared(byte_, 1);
  }
  return byte_;
}

// Whichever of the two comes second sees what the other did.
void Poison::Flag::set() {
  set_ = true;
  if (uint8_t* byte = address_) std::atomic_ref(*byte).store(1, std::memory_order_release);
}

void enqueuePoison(const std::vector<Buffer>& outputs, const at::Tensor& flag,
                   const c10::Device& device) {
  const at::Tensor set = at::empty({}, at::TensorOptions().dtype(at::kByte).device(device));
  set.copy_(flag, /*non_blocking=*/true);
  const at::Tensor mask = set.to(at::kBool);
  for (const Buffer& buffer : outputs) {
    if (buffer.bytes == 0) continue;
    const at::ScalarType type = widestFor(buffer);
    viewOf(buffer, device, type).masked_fill_(mask, type == at::kInt ? -1 : 0xff);
  }
}

void enqueueLowBits(const std::vector<Buffer>& outputs, const c10::Device& device) {
  for (const Buffer& buffer : outputs) {
    if (buffer.bytes > 0) viewOf(buffer, device, at::kByte).bitwise_and_(1);
  }
}

}  // namespace torchft_ext
