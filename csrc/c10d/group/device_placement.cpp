#include "c10d/group/device_placement.h"

#include <ATen/Context.h>

#include <utility>

#include "c10d/adapter/device_arguments.h"
#include "c10d/adapter/nan_check.h"
#include "c10d/work/device_completion.h"
#include "device/on_device.h"
#include "host/process.h"

namespace torchft_ext {
namespace {

bool reduces(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}

std::function<void(const c10::Stream&)> ahead(const Prepared& prepared) {
  if (prepared.loads.empty()) return {};
  return [loads = prepared.loads](const c10::Stream& stream) {
    const OnStream on_stream(stream);
    enqueueLoads(loads);
  };
}

std::function<void(const c10::Stream&)> behind(const c10::Device& device, const Prepared& prepared,
                                               const at::Tensor& poison_flag) {
  const bool low_bit = prepared.low_bit;
  if (!low_bit && !poison_flag.defined() && prepared.stores.empty()) return {};
  return [device, outputs = prepared.operation.outputs, stores = prepared.stores, low_bit,
          poison_flag](const c10::Stream& stream) {
    const OnStream on_stream(stream);
    if (low_bit) enqueueLowBits(outputs, device);
    if (poison_flag.defined()) enqueuePoison(outputs, poison_flag, device);
    enqueueStores(stores);
  };
}

}  // namespace

void DevicePlacement::place(const c10::Device& device, Prepared& prepared) {
  // A barrier may be what uses the device first: its byte comes from an allocator that has to be
  // there.
  if (device.is_cuda()) at::globalContext().lazyInitDevice(device.type());
  const OnDevice on_device(device);
  leaveAheadAtExit();
  Operation& operation = prepared.operation;
  if (!reduces(operation.kind)) operation.dtype = movable(operation.dtype);
  at::Tensor flag;
  if (poison_ && !operation.outputs.empty()) {
    const auto relaxed = devices_.platform()->relaxCapture();  // it may be made here
    flag = poison_->flagOf(operation.generation);
  }
  auto side = std::make_shared<StreamSide>(currentStream(device));
  side->on_current = !prepared.async;
  side->timed = timed_.load(std::memory_order_relaxed);
  side->flat = prepared.flat;
  side->ahead = ahead(prepared);
  side->behind = behind(device, prepared, flag);
  if (nan_check_) {
    // Pinned memory for the answer, whose allocator asks events and may make some.
    const auto relaxed = devices_.platform()->relaxCapture();
    side->result_check = resultCheckFor(prepared, side->current);
  }
  noteUse(device);
  if (flag.defined()) prepared.kept.push_back(std::move(flag));
  if (prepared.factor.defined()) prepared.kept.push_back(std::move(prepared.factor));
  prepared.side = side;
  operation.device = std::move(side);
}

// Enqueues on the stream that the operation's own waits for.
std::function<std::string()> DevicePlacement::resultCheckFor(const Prepared& prepared,
                                                             const c10::Stream& stream) const {
  if (devices_.platform()->capturing(stream)) return {};
  const std::vector<at::Tensor> contributions = contributionsOf(prepared);
  if (contributions.empty()) return {};
  return [found = enqueueNanCheck(contributions), kind = prepared.operation.kind] {
    return found() ? nanFound(kind) : std::string();
  };
}

std::optional<c10::Device> DevicePlacement::forBarrier(const std::vector<int64_t>& chosen) const {
  return devices_.forBarrier(chosen, bound_, used());
}

void DevicePlacement::noteUse(const c10::Device& device) {
  int before = kNoDevice;
  if (used_device_.compare_exchange_strong(before, device.index())) return;
  if (before != device.index()) used_device_.store(kSeveralDevices);
}

std::optional<c10::Device> DevicePlacement::used() const {
  const int index = used_device_.load();
  if (index < 0) return std::nullopt;
  return c10::Device(devices_.platform()->type(), static_cast<c10::DeviceIndex>(index));
}

}  // namespace torchft_ext
