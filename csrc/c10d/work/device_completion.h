// What a Work of device tensors has beside its states: its place among the streams.
//
// Owner: its Work. Threads: any. Constant once made. After an abort the recorded events still fire,
// when their streams are free: waiting for them in stream order stays right. It never blocks the
// host, and destruction does nothing: events go back to their pool, tensors belong to the
// operation.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "device/device_platform.h"
#include "device/stream_side.h"

namespace torchft_ext {

class DeviceCompletion {
 public:
  using Sides = std::vector<std::shared_ptr<StreamSide>>;
  using Future = c10::ivalue::Future;

  // sides: at least one, issued. host_waits: wait() blocks the caller too (barrier, blocking_wait).
  DeviceCompletion(const c10::Device& device, Sides sides, bool host_waits,
                   std::shared_ptr<const DevicePlatform> platform)
      : device_(device),
        sides_(std::move(sides)),
        host_waits_(host_waits),
        platform_(std::move(platform)) {}

  // An operation captured into a graph is complete for the engine at once, which then lets go of
  // its tensors; their memory must not be given to other parts of the graph before wait(). So they
  // stay with the Work. Nothing is kept of others. Before the Work is shared.
  void keepIfCaptured(std::vector<std::shared_ptr<void>> tensors);

  bool hostWaits() const { return host_waits_; }
  bool captured() const;  // into a graph
  bool timed() const { return sides_.front()->start && sides_.back()->end; }
  // The caller's current stream waits for the operation. Nothing where it was never enqueued.
  void blockCurrentStream() const;
  // The same after a failure, but where a graph is captured there; a device that refuses is logged.
  void orderBehind() const noexcept;
  // Behind that, where the operation has not failed: its tensors' memory may be used again in
  // stream order.
  void releaseTensors() const;
  c10::intrusive_ptr<Future> makeFuture(const c10::TypePtr& type) const;
  // At once, under the operation's stream: who waits for the future waits in stream order. Runs its
  // callbacks, which are the user's.
  void complete(Future& future, c10::IValue value) const;
  // On the device; blocks until both events have fired, and disturbs no capture. RuntimeError where
  // timing was not on.
  float milliseconds() const;

 private:
  c10::Device device_;
  Sides sides_;
  bool host_waits_;
  std::shared_ptr<const DevicePlatform> platform_;
  std::vector<std::shared_ptr<void>> captured_tensors_;
};

// The calling thread's current stream on that device.
c10::Stream currentStream(const c10::Device& device);

}  // namespace torchft_ext
