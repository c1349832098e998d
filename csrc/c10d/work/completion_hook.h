// What torch calls the completion hook of a group: a function that is told of every operation once
// it is over.
//
// Owner: the backend, and the callbacks of operations under way. Threads: any. The hook runs on
// callback threads alone, one call after the other in the order in which operations end, with no
// lock held; it may block, issue, abort: the rest is told when it has returned.
// It is told of what was issued after it was set and has succeeded: c10d's WorkInfo has no place
// for a failure, which wait() and errored() tell. Operations captured into a graph end with each
// replay and are not told. After an abort: operations under way end, untold. Destruction does
// nothing. Only awaitAll() blocks.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/mutex.h"
#include "c10d/work/device_completion.h"
#include "comm/op_state.h"

namespace torchft_ext {

class CompletionHook : public std::enable_shared_from_this<CompletionHook> {
 public:
  using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;
  using States = std::vector<std::shared_ptr<OpState>>;

  // For good. False: there is one already.
  bool set(Hook hook);
  void run(const std::shared_ptr<c10d::WorkInfo>& info) const;
  // One Work that has just been issued: nothing without a hook.
  void watch(c10d::OpType type, const States& states,
             const std::optional<DeviceCompletion>& device);
  // Until all that were watched are over and their hooks have returned. How many are not, by the
  // deadline. Calls the wait hook, which may throw. Not on a callback thread.
  size_t awaitAll(Deadline deadline);

 private:
  using Call = std::function<void()>;
  void ended(Call call);
  // The next one to be told; empty: there is none, and whoever comes next is to tell it itself.
  Call next();
  void tellGuarded(c10d::OpType type, const States& states,
                   const std::optional<DeviceCompletion>& device);
  void tell(c10d::OpType type, const States& states, const std::optional<DeviceCompletion>& device);

  mutable Mutex mutex_;
  CondVar changed_;
  std::shared_ptr<const Hook> hook_ GUARDED_BY(mutex_);  // shared: copies of it may need the GIL
  size_t under_way_ GUARDED_BY(mutex_) = 0;
  std::deque<Call> over_ GUARDED_BY(mutex_);  // to be told
  bool telling_ GUARDED_BY(mutex_) = false;   // a thread is at it
};

}  // namespace torchft_ext
