// The streams on which copies between devices and host memory run: two of each device, one in each
// direction, from torch's pool. Nothing else is enqueued there, as long as user code is not given
// the same stream by that pool, and no copy is enqueued before it may begin: so copies wait for
// copies alone.
//
// Owner: the staging thread, which alone uses it. It never blocks.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <memory>
#include <utility>

#include "device/event_pool.h"

namespace torchft_ext {

class CopyStreams {
 public:
  enum class Direction { kLoad, kStore };

  c10::Stream of(c10::Device device, Direction direction) {
    const std::pair key(std::pair(device.type(), device.index()), direction);
    const auto found = streams_.find(key);
    if (found != streams_.end()) return found->second;
    const c10::impl::VirtualGuardImpl impl(device.type());
    return streams_.emplace(key, impl.getStreamFromGlobalPool(device, false)).first->second;
  }
  // Recorded behind all that is in the stream.
  std::shared_ptr<c10::Event> mark(const c10::Stream& stream) {
    auto event = events_->take(stream.device(), false);
    event->record(stream);
    return event;
  }

 private:
  using Key = std::pair<std::pair<c10::DeviceType, c10::DeviceIndex>, Direction>;
  std::map<Key, c10::Stream> streams_;
  const std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>();
};

}  // namespace torchft_ext
