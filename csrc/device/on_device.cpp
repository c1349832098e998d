#include "device/on_device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device/devices_end.h"

namespace torchft_ext {

OnDevice::OnDevice(c10::Device device)
    : before_(c10::impl::getDeviceGuardImpl(device.type())->exchangeDevice(device)) {}

OnDevice::OnDevice(c10::Device device, std::nothrow_t) noexcept : before_(device) {
  try {
    before_ = c10::impl::getDeviceGuardImpl(device.type())->exchangeDevice(device);
  } catch (...) {  // a device in error
    set_ = false;
  }
}

OnDevice::~OnDevice() {
  if (set_ && !devicesEnded())
    c10::impl::getDeviceGuardImpl(before_.type())->uncheckedSetDevice(before_);
}

OnStream::OnStream(const c10::Stream& stream)
    : on_device_(stream.device()),
      before_(c10::impl::getDeviceGuardImpl(stream.device_type())->exchangeStream(stream)) {}

OnStream::~OnStream() {
  if (!devicesEnded())
    c10::impl::getDeviceGuardImpl(before_.device_type())->exchangeStream(before_);
}

}  // namespace torchft_ext
