// torch's completion hooks (2.15 and later). A hook gets the key of each Work that has succeeded.
// torch's recorder uses them to mark operations as completed.
//
// A hook is called once for each Work that is issued while the hook is registered. It is not called
// for a Work that failed, nor for one that was captured into a graph, which ends with each replay.
// It runs on the thread that completes the operation, with no lock held. torch requires such a hook
// to be short, to take no GIL and to call no backend. (completion_hook.h has c10d's older hook,
// which may do all of that.)
//
// Owner: the backend, and operations under way. Threads: any. Blocks only inside of hooks. After an
// abort, operations end and no hook is called. Destruction does nothing.
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
