// Puts operations on their device: the stream that they come behind, and what runs ahead of them
// and behind them there (copies of strided tensors, NaN checks, poison).
//
// Owner: the issuer. Threads: any. It enqueues and never waits for a device, but for the memory
// that the first operation of a generation makes. After a failure: as before; the operations it
// places fail when they are issued.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "c10d/adapter/poison.h"
#include "c10d/adapter/prepared.h"
#include "c10d/group/devices.h"

namespace torchft_ext {

class DevicePlacement {
 public:
  // poison: null where Options.poison is off. bound: the group's own device (device_id=).
  DevicePlacement(Devices devices, std::shared_ptr<Poison> poison, bool nan_check,
                  std::optional<c10::Device> bound)
      : devices_(std::move(devices)),
        poison_(std::move(poison)),
        nan_check_(nan_check),
        bound_(bound) {}

  const Devices& devices() const { return devices_; }
  // Operations that are placed from now on measure what they take on the device.
  void enableTiming() { timed_.store(true, std::memory_order_relaxed); }
  // Behind what the caller has enqueued on the device's current stream. Once for each operation.
  void place(const c10::Device& device, Prepared& prepared);
  // Where a barrier is held; see Devices::forBarrier().
  std::optional<c10::Device> forBarrier(const std::vector<int64_t>& chosen) const;

 private:
  static constexpr int kNoDevice = -1;
  static constexpr int kSeveralDevices = -2;

  void noteUse(const c10::Device& device);
  std::optional<c10::Device> used() const;  // by operations so far; none, or several: nullopt
  std::function<std::string()> resultCheckFor(const Prepared& prepared,
                                              const c10::Stream& stream) const;

  const Devices devices_;
  const std::shared_ptr<Poison> poison_;
  const bool nan_check_;
  const std::optional<c10::Device> bound_;
  std::atomic<bool> timed_{false};           // by enableTiming()
  std::atomic<int> used_device_{kNoDevice};  // written by whoever places
};

}  // namespace torchft_ext
