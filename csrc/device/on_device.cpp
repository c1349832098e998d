#include "device/on_device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace torchft_ext {

OnDevice::OnDevice(c10::Device device)
    : before_(c10::impl::getDeviceGuardImpl(device.type())->exchangeDevice(device)) {}

OnDevice::OnDevice(c10::Device device, std::nothrow_t) noexcept : before_(device) {
  try {
    before_ = c10::impl::getDeviceGuardImpl(device.type())->exchangeDevice(device);
  } catch (...) {  // NOLINT(bugprone-empty-catch): a device in error
  }
}

OnDevice::~OnDevice() {
  c10::impl::getDeviceGuardImpl(before_.type())->uncheckedSetDevice(before_);
}

}  // namespace torchft_ext
