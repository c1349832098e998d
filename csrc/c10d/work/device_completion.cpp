#include "c10d/work/device_completion.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/log.h"
#include "device/on_device.h"

namespace torchft_ext {

c10::Stream currentStream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

bool DeviceCompletion::captured() const {
  return std::any_of(sides_.begin(), sides_.end(), [](const auto& side) { return side->captured; });
}

void DeviceCompletion::keepIfCaptured(std::vector<std::shared_ptr<void>> tensors) {
  if (captured()) captured_tensors_ = std::move(tensors);
}

void DeviceCompletion::blockCurrentStream() const {
  const OnDevice on_device(device_);
  const c10::Stream current = currentStream(device_);
  for (const auto& side : sides_) {
    if (side->end) side->end->block(current);
  }
}

void DeviceCompletion::orderBehind() const noexcept {
  try {
    const OnDevice on_device(device_);
    if (!captured() && !platform_->capturing(currentStream(device_))) blockCurrentStream();
  } catch (const std::exception& error) {
    log(LogLevel::kError,
        std::string("a stream cannot wait for operations that failed: ") + error.what());
  }
}

void DeviceCompletion::releaseTensors() const {
  for (const auto& side : sides_) {
    const auto shelf = side->may_release ? side->shelf.lock() : nullptr;
    if (shelf) shelf->release();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceCompletion::makeFuture(
    const c10::TypePtr& type) const {
  return c10::make_intrusive<Future>(type, std::vector<c10::Device>{device_});
}

void DeviceCompletion::complete(Future& future, c10::IValue value) const {
  const auto last = std::find_if(sides_.rbegin(), sides_.rend(),
                                 [](const auto& side) { return side->stream.has_value(); });
  if (last == sides_.rend()) {  // nothing was enqueued: there is nothing to wait for
    future.markCompleted(std::move(value));
    return;
  }
  const c10::Stream stream = *(*last)->stream;
  const OnStream on_stream(stream);
  for (const auto& side : sides_) {
    if (side->end && side->stream != stream) side->end->block(stream);
  }
  future.markCompleted(std::move(value));
}

float DeviceCompletion::milliseconds() const {
  const auto& first = sides_.front()->start;
  const auto& last = sides_.back()->end;
  TORCH_CHECK(
      !captured(),
      "get_duration(): the operation was captured into a graph, whose replays have times of their "
      "own: measure those with events of yours around replay()");
  TORCH_CHECK(timed(),
              "get_duration(): timing was off when the operation was issued; turn it on with the "
              "group's _enable_collectives_timing()");
  const OnDevice on_device(device_);
  const auto relaxed = platform_->relaxCapture();
  TORCH_CHECK(last->query(),
              "get_duration(): the operation has not completed; synchronise with it first");
  return static_cast<float>(first->elapsedTime(*last));
}

}  // namespace torchft_ext
