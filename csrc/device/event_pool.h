// Events for reuse, by device and whether they are timed: making one costs a call into the driver,
// and some drivers wait for the device when one is destroyed.
//
// Owner: the process's threads of an engine. An event returns when its last owner lets go, on that
// owner's thread; the pool itself lives until no event is out. In a forked child events are left
// alone: they are the parent's. So are they at exit, where none can be destroyed
// (device/devices_end.h). Threads: any. Never blocks.
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
  struct End {
    void operator()(c10::Event* event) const;
  };
  using EventPtr = std::unique_ptr<c10::Event, End>;
  void giveBack(const Key& key, EventPtr event);

  Mutex mutex_;
  std::map<Key, std::vector<EventPtr>, Less> idle_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
