#include "c10d/work/completion_hook.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <string>
#include <utility>

#include "base/log.h"

namespace torchft_ext {
namespace {

using Seconds = std::chrono::duration<float>;

constexpr milliseconds kLookForSignalsEvery{50};

// On a device: between the events before and after it. On the host: since it was issued.
Seconds activeDuration(const OpState& first, const std::optional<DeviceCompletion>& device,
                       Clock::time_point finished) {
  if (!device) return finished - first.issuedAt();
  if (!device->timed()) return Seconds(0);
  return std::chrono::duration<float, std::milli>(device->milliseconds());
}

}  // namespace

bool CompletionHook::set(Hook hook) {
  auto shared = std::make_shared<const Hook>(std::move(hook));
  const MutexLock lock(mutex_);
  if (hook_) return false;
  hook_ = std::move(shared);
  return true;
}

void CompletionHook::run(const std::shared_ptr<c10d::WorkInfo>& info) const {
  std::shared_ptr<const Hook> hook;
  {
    const MutexLock lock(mutex_);
    hook = hook_;
  }
  if (hook) (*hook)(info);
}

void CompletionHook::watch(c10d::OpType type, const States& states,
                           const std::optional<DeviceCompletion>& device) {
  if (device && device->captured()) return;
  {
    const MutexLock lock(mutex_);
    if (!hook_) return;
    ++under_way_;
  }
  auto left = std::make_shared<std::atomic<size_t>>(states.size());
  for (const auto& state : states) {
    state->onDone([self = shared_from_this(), left, type, states, device] {
      if (left->fetch_sub(1) != 1) return;
      self->ended([self, type, states, device] { self->tellGuarded(type, states, device); });
    });
  }
}

void CompletionHook::ended(Call call) {
  {
    const MutexLock lock(mutex_);
    over_.push_back(std::move(call));
    if (std::exchange(telling_, true)) return;
  }
  while (const Call one = next()) one();
}

CompletionHook::Call CompletionHook::next() {
  const MutexLock lock(mutex_);
  telling_ = !over_.empty();
  if (!telling_) return nullptr;
  Call one = std::move(over_.front());
  over_.pop_front();
  return one;
}

void CompletionHook::tellGuarded(c10d::OpType type, const States& states,
                                 const std::optional<DeviceCompletion>& device) {
  try {
    const bool succeeded = std::all_of(states.begin(), states.end(),
                                       [](const auto& state) { return !state->failure(); });
    if (succeeded) tell(type, states, device);
  } catch (const std::exception& error) {
    log(LogLevel::kError, std::string("a completion hook threw: ") + error.what());
  } catch (...) {
    log(LogLevel::kError, "a completion hook threw");
  }
  const MutexLock lock(mutex_);
  --under_way_;
  changed_.notifyAll();
}

void CompletionHook::tell(c10d::OpType type, const States& states,
                          const std::optional<DeviceCompletion>& device) {
  const Clock::time_point finished = Clock::now();
  const OpState& first = *states.front();
  run(std::make_shared<c10d::WorkInfo>(
      type, static_cast<uint64_t>(std::max<int64_t>(first.seq(), 0)), first.issuedAt(), finished,
      activeDuration(first, device, finished)));
}

size_t CompletionHook::awaitAll(Deadline deadline) {
  while (true) {
    const Deadline slice = deadline.orEarlier(Duration(kLookForSignalsEvery));
    {
      const MutexLock lock(mutex_);
      while (under_way_ > 0 && !slice.expired()) changed_.waitUntil(mutex_, slice);
      if (under_way_ == 0 || deadline.expired()) return under_way_;
    }
    runWaitHook();
  }
}

}  // namespace torchft_ext
