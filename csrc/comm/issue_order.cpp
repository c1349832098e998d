#include "comm/issue_order.h"

#include "comm/op_state.h"

namespace torchft_ext {

bool IssueOrder::tryEnterLocked() {
  const std::thread::id self = std::this_thread::get_id();
  if (owner_ == self)
    throw std::runtime_error(
        "an operation was issued while this thread is issuing another one of the same group: a "
        "signal's handler must not use a group that the interrupted thread uses");
  if (owner_) return false;
  owner_ = self;
  return true;
}

bool IssueOrder::tryEnter() {
  MutexLock lock(mutex_);
  return tryEnterLocked();
}

bool IssueOrder::enter(Deadline deadline, const std::function<bool()>& givenUp) {
  while (true) {
    {
      MutexLock lock(mutex_);
      if (tryEnterLocked()) return true;
      const Deadline slice = deadline.orEarlier(kHookInterval);
      ++waiting_;
      while (owner_ && !slice.expired()) changed_.waitUntil(mutex_, slice);
      --waiting_;
      if (tryEnterLocked()) return true;
    }
    if (deadline.expired() || (givenUp && givenUp())) return false;
    runWaitHook();
  }
}

void IssueOrder::leave() {
  MutexLock lock(mutex_);
  owner_.reset();
  if (waiting_ > 0) changed_.notifyAll();
}

std::optional<IssueOrders::Turn> IssueOrders::tryEnter(bool host, bool device) {
  Turn turn;
  if (host) {
    if (!host_.tryEnter()) return std::nullopt;
    turn.host_.reset(&host_);
  }
  if (device) {
    if (!device_.tryEnter()) return std::nullopt;
    turn.device_.reset(&device_);
  }
  return turn;
}

std::optional<IssueOrders::Turn> IssueOrders::enter(bool host, bool device, Deadline deadline,
                                                    const std::function<bool()>& givenUp) {
  Turn turn;
  if (host) {
    if (!host_.enter(deadline, givenUp)) return std::nullopt;
    turn.host_.reset(&host_);
  }
  if (device) {
    if (!device_.enter(deadline, givenUp)) return std::nullopt;
    turn.device_.reset(&device_);
  }
  return turn;
}

}  // namespace torchft_ext
