#include "liveness/hand_off_thread.h"

#include <sched.h>

#include <utility>

namespace torchft_ext {

bool LoopHandle::post(EventLoop::Task task) {
  MutexLock lock(mutex_);
  return loop_ != nullptr && loop_->post(std::move(task));
}

void LoopHandle::close() {
  MutexLock lock(mutex_);
  loop_ = nullptr;
}

HandOffThread::HandOffThread(bool realtime) : thread_("ft-handoff") {
  if (!realtime) return;
  // Like the loops it stands between; where it is not allowed, it goes on without.
  thread_.post([] {
    sched_param parameters{};
    parameters.sched_priority = ::sched_get_priority_min(SCHED_FIFO);
    ::sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &parameters);
  });
}

void HandOffThread::post(const std::shared_ptr<LoopHandle>& handle, EventLoop::Task task) {
  thread_.post([handle, task = std::move(task)]() mutable { handle->post(std::move(task)); });
}

}  // namespace torchft_ext
