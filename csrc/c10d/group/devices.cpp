#include "c10d/group/devices.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

namespace torchft_ext {

std::vector<c10::DeviceType> Devices::types() const {
  std::vector<c10::DeviceType> types;
  if (host_) types.push_back(c10::DeviceType::CPU);
  if (platform_) types.push_back(platform_->type());
  if (staged_) types.push_back(staged_->type());
  return types;
}

c10::Device Devices::of(const char* op, const std::vector<at::Tensor>& tensors) const {
  if (tensors.empty()) return c10::kCPU;
  const c10::Device device = tensors.front().device();
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.device() == device, op, ": tensors: expected all on one device, ",
                      device, ", found one on ", tensor.device());
  }
  checkServed(op, device);
  return device;
}

void Devices::checkServed(const char* op, const c10::Device& device) const {
  if (device.is_cpu()) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        host_, op, ": tensors: this group serves ", c10::DeviceTypeName(platform_->type()),
        " tensors only, found CPU tensors: use the backend 'ft' for both, or a spec that has one "
        "for each, 'cpu:...,",
        c10::DeviceTypeName(platform_->type(), /*lower_case=*/true), ":...'");
    return;
  }
  const DevicePlatform* served = platform_ ? platform_.get() : staged_.get();
  TORCH_CHECK_NOT_IMPLEMENTED(served != nullptr, op,
                              ": tensors: this group serves CPU tensors only, found tensors on ",
                              device, ": ", why_none_);
  TORCH_CHECK_NOT_IMPLEMENTED(
      device.type() == served->type(), op, ": tensors: expected tensors on ",
      c10::DeviceTypeName(served->type()), host_ ? " or CPU" : "", ", found tensors on ", device);
}

std::optional<c10::Device> Devices::forBarrier(const std::vector<int64_t>& chosen,
                                               const std::optional<c10::Device>& bound,
                                               const std::optional<c10::Device>& used) const {
  if (!platform_) return std::nullopt;
  const c10::DeviceType type = platform_->type();
  if (!chosen.empty()) {
    const c10::impl::VirtualGuardImpl impl(type);
    TORCH_CHECK_VALUE(chosen[0] >= 0 && chosen[0] < impl.deviceCount(),
                      "barrier: device_ids: expected a device index from 0 to ",
                      impl.deviceCount() - 1, ", found ", chosen[0]);
    return c10::Device(type, static_cast<c10::DeviceIndex>(chosen[0]));
  }
  if (bound) return bound;
  if (host_) return std::nullopt;
  TORCH_CHECK_VALUE(used,
                    "barrier: device_ids: expected the device on which it is held, since this ",
                    "group has used none yet, or several; pass barrier(device_ids=[index]), or "
                    "bind the group to its device (init_process_group(device_id=...))");
  return used;
}

}  // namespace torchft_ext
