#include "comm/lifecycle.h"

#include <unistd.h>

#include <exception>
#include <utility>

#include "base/host_name.h"
#include "base/log.h"

namespace torchft_ext {
namespace {

// A subscriber that throws must not keep the others from learning of the failure.
void notify(const Lifecycle::OnFailed& subscriber, const FailurePtr& failure) noexcept {
  try {
    subscriber(failure);
  } catch (const std::exception& error) {
    log(LogLevel::kError,
        std::string("a subscriber to a generation's failure threw: ") + error.what());
  } catch (...) {
    log(LogLevel::kError, "a subscriber to a generation's failure threw");
  }
}

}  // namespace

FailurePtr Lifecycle::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

Failure Lifecycle::ownFailure(FailureKind kind, std::string how) const {
  Failure failure;
  failure.kind = kind;
  failure.cause.rank = identity_.rank;
  failure.cause.host = hostName();
  failure.cause.pid = ::getpid();
  failure.cause.how = std::move(how);
  return failure;
}

bool Lifecycle::activate() {
  MutexLock lock(mutex_);
  if (over()) return false;
  state_.store(State::kActive, std::memory_order_release);
  return true;
}

bool Lifecycle::fail(Failure failure) {
  failure.group = identity_.group;
  failure.generation = identity_.generation;
  failure.rank = identity_.rank;
  failure.size = identity_.size;
  failure.in_job = identity_.in_job;
  failure.at = Clock::now();
  const auto kept = std::make_shared<const Failure>(std::move(failure));
  std::map<Subscription, OnFailed> subscribers;
  {
    MutexLock lock(mutex_);
    if (over()) return false;
    failure_ = kept;
    state_.store(State::kFailed, std::memory_order_release);
    subscribers.swap(subscribers_);
  }
  for (const auto& [id, subscriber] : subscribers) notify(subscriber, kept);
  return true;
}

bool Lifecycle::end() {
  std::map<Subscription, OnFailed> dropped;  // destroyed without the lock
  MutexLock lock(mutex_);
  if (state() == State::kFailed) return false;
  state_.store(State::kEnded, std::memory_order_release);
  dropped.swap(subscribers_);
  return true;
}

void Lifecycle::listenToWaits(OnWaits on_waits) {
  MutexLock lock(mutex_);
  on_waits_.swap(on_waits);  // the one before is destroyed without the lock
}

void Lifecycle::tellWaits(const Operations& operations) const {
  OnWaits on_waits;
  {
    MutexLock lock(mutex_);
    on_waits = on_waits_;
  }
  if (on_waits && !over()) on_waits(operations);
}

Lifecycle::Subscription Lifecycle::subscribe(OnFailed on_failed) {
  FailurePtr failed;
  {
    MutexLock lock(mutex_);
    if (!over()) {
      const Subscription id = next_++;
      subscribers_.emplace(id, std::move(on_failed));
      return id;
    }
    failed = failure_;
  }
  if (failed) notify(on_failed, failed);
  return 0;
}

void Lifecycle::unsubscribe(Subscription id) {
  std::map<Subscription, OnFailed>::node_type removed;  // destroyed without the lock
  MutexLock lock(mutex_);
  removed = subscribers_.extract(id);
}

}  // namespace torchft_ext
