#include "staged/staged_communicator.h"

#include <utility>

#include "staged/staging_thread.h"

namespace torchft_ext {

StagedCommunicator::StagedCommunicator(std::shared_ptr<Communicator> host,
                                       std::shared_ptr<Lifecycle> lifecycle,
                                       std::shared_ptr<const DevicePlatform> platform)
    : host_(std::move(host)),
      lifecycle_(std::move(lifecycle)),
      queue_(std::make_shared<StagingQueue>(host_, lifecycle_, std::move(platform))),
      subscription_(lifecycle_->subscribe([](const FailurePtr&) { StagingThread::wake(); })) {}

StagedCommunicator::~StagedCommunicator() {
  if (!queue_->awaitTaken(Deadline::after(Duration::zero()))) {
    Failure failure =
        lifecycle_->ownFailure(FailureKind::kAborted, "its group object was destroyed");
    failure.needs_new_group = true;
    lifecycle_->fail(std::move(failure));
  }
  lifecycle_->unsubscribe(subscription_);
}

void StagedCommunicator::issue(std::shared_ptr<OpState> state, Operation operation) {
  if (!queue_->take(state, operation)) host_->issue(std::move(state), std::move(operation));
}

bool StagedCommunicator::awaitIssued(Deadline deadline) {
  while (!queue_->awaitTaken(deadline.orEarlier(kHookInterval))) {
    if (deadline.expired()) return false;
    runWaitHook();
  }
  return host_->awaitIssued(deadline);
}

// The thread of the copies would wait for itself.
bool StagedCommunicator::drain(Deadline deadline) {
  const bool host = host_->drain(deadline);
  return StagingThread::isSelf() || (queue_->awaitTaken(deadline) && host);
}

bool StagedCommunicator::leave(Deadline deadline) {
  return awaitIssued(deadline) && host_->leave(deadline);
}

bool StagedCommunicator::leaveForAnother(Deadline deadline) {
  return queue_->awaitTaken(deadline) && host_->leaveForAnother(deadline);
}

}  // namespace torchft_ext
