#include "peers/relay.h"

#include <sched.h>

#include <utility>

namespace torchft_ext {

bool LoopDoor::post(EventLoop::Task task) {
  MutexLock lock(mutex_);
  return loop_ != nullptr && loop_->post(std::move(task));
}

void LoopDoor::close() {
  MutexLock lock(mutex_);
  loop_ = nullptr;
}

Relay::Relay(bool realtime) : thread_("ft-relay") {
  if (!realtime) return;
  // Like the loops it stands between; where it is not allowed, it goes on without.
  thread_.post([] {
    sched_param parameters{};
    parameters.sched_priority = ::sched_get_priority_min(SCHED_FIFO);
    ::sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &parameters);
  });
}

void Relay::post(const std::shared_ptr<LoopDoor>& door, EventLoop::Task task) {
  thread_.post([door, task = std::move(task)]() mutable { door->post(std::move(task)); });
}

}  // namespace torchft_ext
