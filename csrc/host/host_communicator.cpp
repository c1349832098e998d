#include "host/host_communicator.h"

#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "comm/callbacks.h"

namespace torchft_ext {
namespace {

// A member that reads takes them in microseconds.
constexpr Duration kDroppedSendsWithin = std::chrono::seconds(1);
constexpr Duration kLookForArrival = std::chrono::microseconds(100);

Failure aborted(const Lifecycle& lifecycle, const char* how) {
  Failure failure;
  failure.kind = FailureKind::kAborted;
  failure.cause.rank = lifecycle.identity().rank;
  failure.cause.how = how;
  return failure;
}

}  // namespace

HostCommunicator::HostCommunicator(EventLoop& loop, std::shared_ptr<HostGeneration> generation,
                                   std::shared_ptr<Lifecycle> lifecycle,
                                   std::shared_ptr<void> keep_alive)
    : loop_(loop),
      generation_(std::move(generation)),
      lane_(generation_->lane()),
      why_over_sockets_(generation_->whyOverSockets()),
      lifecycle_(std::move(lifecycle)),
      keep_alive_(std::move(keep_alive)) {}

HostCommunicator::~HostCommunicator() {
  Failure failure = aborted(*lifecycle_, "its group object was destroyed");
  failure.needs_new_group = true;
  const bool posted = loop_.post([generation = std::move(generation_), failure] {
    generation->dropped(failure, Deadline::after(kDroppedSendsWithin));
  });
  if (!posted) lifecycle_->fail(std::move(failure));
  // A subscriber of the lifecycle may have been the last owner, and runs on the loop: the engine
  // must not end there, since its loop would go before what is still to be released on it.
  if (loop_.inLoop()) runOnCallbackThread([engine = std::move(keep_alive_)] {});
}

void HostCommunicator::issue(std::shared_ptr<OpState> state, Operation operation) {
  const bool ordered = isCollective(operation.kind) && operation.name == 0;
  if (lane_ && ordered) return lane_->add(std::move(state), std::move(operation));
  auto shared_state = state;
  const bool posted = loop_.post([generation = generation_, state = std::move(state),
                                  operation = std::move(operation)]() mutable {
    generation->issue(std::move(state), std::move(operation));
  });
  if (!posted) {
    lifecycle_->fail(aborted(*lifecycle_, "its process is shutting down"));
    shared_state->complete(shared_state->inPlace(lifecycle_->failure()));
  }
}

void HostCommunicator::onPeerLeft(const OnPeerLeft& told) {
  loop_.post([generation = generation_, told] { generation->tellOfLeavers(told); });
}

bool HostCommunicator::tellOfFailure(Deadline deadline) {
  const auto arrived = std::make_shared<std::atomic<bool>>(false);
  while (true) {
    const bool ran = loop_.runOnLoop(
        [generation = generation_, arrived] { *arrived = generation->tellOfFailure(); }, deadline);
    if (!ran || *arrived || deadline.expired()) return *arrived;
    std::this_thread::sleep_for(kLookForArrival);
  }
}

bool HostCommunicator::whenNoticesRead(std::function<void()> then) {
  return loop_.post([generation = generation_, then = std::move(then)]() mutable {
    generation->whenRead(std::move(then));
  });
}

bool HostCommunicator::drain(Deadline deadline) {
  return generation_->waitDrained(deadline);
}

bool HostCommunicator::leave(Deadline deadline) {
  return depart(HostGeneration::GoodbyeKind::kForGood, deadline);
}

bool HostCommunicator::leaveForAnother(Deadline deadline) {
  return depart(HostGeneration::GoodbyeKind::kForAnotherGeneration, deadline);
}

bool HostCommunicator::depart(HostGeneration::GoodbyeKind goodbye_kind, Deadline deadline) {
  struct Waiter {
    Mutex mutex;
    CondVar changed;
    std::optional<bool> left GUARDED_BY(mutex);
  };
  auto waiter = std::make_shared<Waiter>();
  const bool posted = loop_.post([generation = generation_, waiter, goodbye_kind] {
    generation->leave(goodbye_kind, [waiter](bool left) {
      MutexLock lock(waiter->mutex);
      waiter->left = left;
      waiter->changed.notifyAll();
    });
  });
  if (!posted) return false;
  while (true) {
    {
      MutexLock lock(waiter->mutex);
      const Deadline slice = deadline.orEarlier(kHookInterval);
      while (!waiter->left && !slice.expired()) waiter->changed.waitUntil(waiter->mutex, slice);
      if (waiter->left || deadline.expired()) return waiter->left.value_or(false);
    }
    runWaitHook();
  }
}

uint64_t HostCommunicator::bytesSent() const {
  return generation_->traffic().sent.load(std::memory_order_relaxed);
}
uint64_t HostCommunicator::bytesReceived() const {
  return generation_->traffic().received.load(std::memory_order_relaxed);
}

}  // namespace torchft_ext
