#include "c10d/work/success_hooks.h"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace torchft_ext {
namespace {

// On a device: between the events before and after it. On the host: from issue to end.
std::optional<float> took(const SuccessHooks::States& states,
                          const std::optional<DeviceCompletion>& device) {
  if (device) return device->timed() ? std::optional(device->milliseconds()) : std::nullopt;
  Duration longest{0};
  for (const auto& state : states) longest = std::max(longest, *state->took());
  return std::chrono::duration<float, std::milli>(longest).count();
}

}  // namespace

void SuccessHooks::watch(const Keys& keys, const States& states,
                         const std::optional<DeviceCompletion>& device) {
  if (hooks_.empty() || (device && device->captured())) return;
  auto left = std::make_shared<std::atomic<size_t>>(states.size());
  for (const auto& state : states) {
    state->onDoneAtOnce([self = shared_from_this(), left, keys, states, device] {
      if (left->fetch_sub(1) == 1) self->ended(keys, states, device);
    });
  }
}

void SuccessHooks::ended(const Keys& keys, const States& states,
                         const std::optional<DeviceCompletion>& device) const {
  const bool failed =
      std::any_of(states.begin(), states.end(), [](const auto& state) { return state->failure(); });
  if (failed) return;
  const std::optional<float> milliseconds = took(states, device);
  for (const uint64_t key : keys) hooks_.call(key, milliseconds);
}

}  // namespace torchft_ext
