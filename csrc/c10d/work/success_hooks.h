// What torch calls completion hooks (2.15 and later): functions that are told of each Work that has
// succeeded, by its key. torch's recorder marks by them what has completed.
//
// Once for each Work that is issued while there is a hook; never of one that has failed, and not of
// one that was captured into a graph, which ends with each replay. On the thread that completes the
// operation, with no lock held: torch asks of such a hook that it be short, take no GIL and call no
// backend. (c10d's older hook, which may do all of that, is completion_hook.h.)
//
// Owner: the backend, and operations under way. Threads: any. It never blocks, but for the hooks.
// After an abort: operations end, untold. Destruction does nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "c10d/work/device_completion.h"
#include "c10d/work/hook_table.h"
#include "comm/op_state.h"

namespace torchft_ext {

class SuccessHooks : public std::enable_shared_from_this<SuccessHooks> {
 public:
  using Keys = std::vector<uint64_t>;
  using States = std::vector<std::shared_ptr<OpState>>;
  using Table = HookTable<uint64_t, std::optional<float>>;  // key; milliseconds, where known
  using Hook = Table::Hook;

  Table& table() { return hooks_; }
  // Works that end together, once all these states have. Nothing without a hook.
  void watch(const Keys& keys, const States& states, const std::optional<DeviceCompletion>& device);

 private:
  void ended(const Keys& keys, const States& states,
             const std::optional<DeviceCompletion>& device) const;

  Table hooks_{"completion hook"};
};

}  // namespace torchft_ext
