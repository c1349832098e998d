#include "c10d/poison.h"

#include <atomic>

namespace torchft_ext {
namespace {

at::Tensor bytesOf(const Buffer& buffer, const c10::Device& device, at::ScalarType type) {
  const auto count = static_cast<int64_t>(buffer.bytes / c10::elementSize(type));
  return at::for_blob(buffer.data, {count})
      .options(at::TensorOptions().dtype(type).device(device))
      .target_device(device)
      .make_tensor();
}

// Wider elements where the memory allows it: a quarter of the work.
at::ScalarType widestFor(const Buffer& buffer) {
  const auto address = reinterpret_cast<uintptr_t>(buffer.data);
  return address % 4 == 0 && buffer.bytes % 4 == 0 ? at::kInt : at::kByte;
}

void write(const at::Tensor& flag, uint8_t value) {
  std::atomic_ref(*static_cast<uint8_t*>(flag.mutable_data_ptr()))
      .store(value, std::memory_order_release);
}

// CUDA reads pinned host memory when the stream gets there. The memory of other devices (a
// simulated one) is taken to be the host's.
at::Tensor makeFlag(c10::DeviceType device_type) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  at::Tensor flag = device_type == c10::kCUDA ? at::empty({}, options.pinned_memory(true))
                                              : at::empty({}, options.device(device_type));
  write(flag, 0);
  return flag;
}

}  // namespace

std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> PoisonEngine::form(
    const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
    const std::function<bool()>& superseded) {
  if (isNew(lifecycle)) {  // else: another attempt to form the same epoch
    const at::Tensor flag = makeFlag(device_type_);
    lifecycle->subscribe([flag](const FailurePtr&) { write(flag, 1); });
    const MutexLock lock(mutex_);
    flag_ = flag;
    latest_ = lifecycle;
  }
  return inner_->form(roster, std::move(lifecycle), deadline, superseded);
}

bool PoisonEngine::isNew(const std::shared_ptr<Lifecycle>& lifecycle) const {
  const MutexLock lock(mutex_);
  return latest_.lock() != lifecycle;
}

at::Tensor PoisonEngine::flagOf(int64_t epoch) const {
  const MutexLock lock(mutex_);
  const auto lifecycle = latest_.lock();
  return lifecycle && lifecycle->identity().epoch == epoch ? flag_ : at::Tensor();
}

void enqueuePoison(const std::vector<Buffer>& outputs, const at::Tensor& flag,
                   const c10::Device& device) {
  const at::Tensor set = at::empty({}, at::TensorOptions().dtype(at::kByte).device(device));
  set.copy_(flag, /*non_blocking=*/true);
  const at::Tensor mask = set.to(at::kBool);
  for (const Buffer& buffer : outputs) {
    if (buffer.bytes == 0) continue;
    const at::ScalarType type = widestFor(buffer);
    bytesOf(buffer, device, type).masked_fill_(mask, type == at::kInt ? -1 : 0xff);
  }
}

void enqueueLowBits(const std::vector<Buffer>& outputs, const c10::Device& device) {
  for (const Buffer& buffer : outputs) {
    if (buffer.bytes > 0) bytesOf(buffer, device, at::kByte).bitwise_and_(1);
  }
}

}  // namespace torchft_ext
