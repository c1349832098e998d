#include "comm/op_state.h"

#include <algorithm>
#include <utility>

#include "base/main_thread_waits.h"
#include "comm/callback_pool.h"
#include "comm/callbacks.h"
#include "comm/operation_recorder.h"
#include "comm/stall_clock.h"

namespace torchft_ext {
namespace {

std::atomic<WaitHook> wait_hook{nullptr};  // written by setWaitHook() alone

}  // namespace

void setWaitHook(WaitHook hook) {
  wait_hook.store(hook, std::memory_order_release);
}
void runWaitHook() {
  StallClock::look();
  const WaitHook hook = wait_hook.load(std::memory_order_acquire);
  if (hook == nullptr) return;
  hook();
  StallClock::goOn();
}

// As Deadline::after(), without another look at the clock.
static Deadline deadlineFrom(Clock::time_point begin, Duration timeout) {
  if (timeout < Duration::zero() || timeout > kCentury) return Deadline::never();
  return Deadline::at(begin + timeout);
}

OpState::OpState(std::shared_ptr<Lifecycle> lifecycle, OpKind kind, int64_t seq, Duration timeout,
                 std::optional<CallbackPath> path, Whose whose)
    : lifecycle_(std::move(lifecycle)),
      kind_(kind),
      seq_(seq),
      timeout_(timeout),
      issued_at_(Clock::now()),
      deadline_(deadlineFrom(issued_at_, timeout)),
      path_(path),
      whose_(whose) {}

std::string OpState::describe() const {
  const bool nested = seq_ == kNoSeq && path_;
  return nested ? inCallbackOf(toString(kind_), *path_) : toString(kind_);
}

Clock::time_point OpState::askAt() const {
  const Duration after = lifecycle_ ? lifecycle_->askAfter() : Duration::zero();
  if (after <= Duration::zero() || after > kCentury) return Clock::time_point::max();
  return issued_at_ + (deadline_.isNever() ? after : std::min(after, timeout_ / 2));
}

std::optional<std::string> OpState::waitedFor() const {
  MutexLock lock(mutex_);
  return waited_for_;
}

void OpState::setWaitedFor(std::string waited_for, const std::vector<int>& ranks) {
  if (OperationRecorder* const recorder = this->recorder())
    recorder->waitedFor(recorded_as_, ranks);
  MutexLock lock(mutex_);
  waited_for_ = std::move(waited_for);
}

std::string OpState::whyItWaited() const {
  const auto waited_for = waitedFor();
  if (!waited_for) return "";
  return waited_for->empty() ? ", though all ranks have issued it"
                             : ": it waited for " + *waited_for;
}

FailurePtr OpState::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

std::optional<Duration> OpState::took() const {
  MutexLock lock(mutex_);
  return done() ? std::optional<Duration>(done_at_ - issued_at_) : std::nullopt;
}

void OpState::complete(FailurePtr failure) {
  if (done()) return;
  if (failure) failure = inPlace(failure);
  Callbacks callbacks;
  Callbacks at_once;
  {
    MutexLock lock(mutex_);
    if (done()) return;
    // Before anybody is released who may ask.
    if (!failure && lifecycle_ && whose_ == Whose::kUsers) lifecycle_->noteSuccess();
    failure_ = std::move(failure);
    done_at_ = Clock::now();
    if (OperationRecorder* const recorder = this->recorder())
      recorder->ended(recorded_as_, failure_ != nullptr, done_at_);
    done_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
    at_once.swap(callbacks_at_once_);
    changed_.notifyAll();
  }
  for (auto& callback : at_once) runGuarded(std::move(callback));
  for (auto& callback : callbacks) runOnCallbackThread(std::move(callback), lifecycle_);
}

OperationRecorder* OpState::recorder() const {
  return recorded_as_ == 0 ? nullptr : lifecycle_->recorder().get();
}

void OpState::noteStarted() {
  if (OperationRecorder* const recorder = this->recorder())
    recorder->started(recorded_as_, Clock::now());
}

bool OpState::wait(Deadline deadline) {
  if (done()) return true;
  const CallbackWaits waits;
  const MainThreadWaits main_thread_waits;
  while (!done()) {
    const Deadline slice = deadline.orEarlier(kHookInterval);
    if (!helped(slice)) {
      MutexLock lock(mutex_);
      while (!done() && !slice.expired()) changed_.waitUntil(mutex_, slice);
    }
    if (done()) return true;
    if (deadline.expired()) return false;
    runWaitHook();
  }
  return true;
}

bool OpState::helped(Deadline slice) {
  const auto helper = helper_.lock();
  return helper && helper->help(*this, slice);
}

bool OpState::keep(std::function<void()>& callback, Callbacks OpState::*callbacks) {
  MutexLock lock(mutex_);
  if (done()) return false;
  (this->*callbacks).push_back(std::move(callback));
  return true;
}

void OpState::onDone(std::function<void()> callback) {
  if (!keep(callback, &OpState::callbacks_)) runOnCallbackThread(std::move(callback), lifecycle_);
}

void OpState::onDoneAtOnce(std::function<void()> callback) {
  if (!keep(callback, &OpState::callbacks_at_once_)) runGuarded(std::move(callback));
}

FailurePtr OpState::inPlace(const FailurePtr& generation_failure) const {
  if (!generation_failure) return nullptr;
  auto placed = std::make_shared<Failure>(*generation_failure);
  if (lifecycle_) {
    const GenerationIdentity& identity = lifecycle_->identity();
    placed->group = identity.group;
    placed->generation = identity.generation;
    placed->rank = identity.rank;
    placed->size = identity.size;
  }
  placed->op = describe();
  placed->seq = seq_;
  placed->elapsed = Clock::now() - issued_at_;
  placed->limit = deadline_.isNever() ? Duration::zero() : timeout_;
  return placed;
}

}  // namespace torchft_ext
