// Events for reuse, by device and whether they are timed: making one costs a call into the driver,
// and some drivers wait for the device when one is destroyed.
//
// Owner: the process's NCCL threads. An event returns when its last owner lets go, on that owner's
// thread; the pool itself lives until no event is out. In a forked child events are left alone:
// they are the parent's. Threads: any. Never blocks.
#pragma once

#include <c10/core/Event.h>

#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace torchft_ext {

class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  std::shared_ptr<c10::Event> take(c10::Device device, bool timed);
  // For graphs: an event that was recorded into one may not be recorded anew outside.
  static std::shared_ptr<c10::Event> fresh(c10::Device device, bool timed);

  size_t idleForTest();

 private:
  using Key = std::pair<c10::Device, bool>;
  struct Less {
    bool operator()(const Key& a, const Key& b) const;
  };
  void giveBack(const Key& key, std::unique_ptr<c10::Event> event);

  Mutex mutex_;
  std::map<Key, std::vector<std::unique_ptr<c10::Event>>, Less> idle_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
