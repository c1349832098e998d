#include "device/event_pool.h"

#include <tuple>

#include "base/fork.h"
#include "device/devices_end.h"

namespace torchft_ext {
namespace {

constexpr size_t kMostIdle = 1024;  // of one kind; more are destroyed

c10::EventFlag flagFor(bool timed) {
  return timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
}

}  // namespace

void EventPool::End::operator()(c10::Event* event) const {
  if (!devicesEnded()) delete event;
}

bool EventPool::Less::operator()(const Key& a, const Key& b) const {
  return std::make_tuple(a.first.type(), a.first.index(), a.second) <
         std::make_tuple(b.first.type(), b.first.index(), b.second);
}

std::shared_ptr<c10::Event> EventPool::take(c10::Device device, bool timed) {
  const Key key(device, timed);
  EventPtr event;
  {
    MutexLock lock(mutex_);
    auto& idle = idle_[key];
    if (!idle.empty()) {
      event = std::move(idle.back());
      idle.pop_back();
    }
  }
  if (!event) event = EventPtr(new c10::Event(device.type(), flagFor(timed)));
  return {event.release(),
          [pool = shared_from_this(), key, fork_count = forkCount()](c10::Event* used) {
            if (fork_count == forkCount()) pool->giveBack(key, EventPtr(used));
          }};
}

std::shared_ptr<c10::Event> EventPool::fresh(c10::Device device, bool timed) {
  return {new c10::Event(device.type(), flagFor(timed)),
          [fork_count = forkCount()](c10::Event* used) {
            if (fork_count == forkCount()) End()(used);
          }};
}

void EventPool::giveBack(const Key& key, EventPtr event) {
  MutexLock lock(mutex_);
  auto& idle = idle_[key];
  if (idle.size() < kMostIdle) idle.push_back(std::move(event));  // else it ends after the lock
}

size_t EventPool::idleForTest() {
  MutexLock lock(mutex_);
  size_t count = 0;
  for (const auto& [key, events] : idle_) count += events.size();
  return count;
}

}  // namespace torchft_ext
