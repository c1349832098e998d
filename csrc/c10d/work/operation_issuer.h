// From prepared operations to their Work: gives them their limits, buckets and device, and issues
// them in the group, one by one or as a block.
//
// Owner: the backend. Threads: any. After a failure of the generation: the Works have failed
// already. It never blocks and never takes the GIL. Destruction does nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "c10d/adapter/prepared.h"
#include "c10d/ddp/bucket_layouts.h"
#include "c10d/group/device_placement.h"
#include "c10d/group/ephemeral_timeouts.h"
#include "c10d/work/coalescing.h"
#include "c10d/work/completion_hook.h"
#include "c10d/work/ft_work.h"
#include "c10d/work/profiler_titles.h"
#include "c10d/work/success_hooks.h"
#include "comm/group.h"

namespace torchft_ext {

class OperationIssuer {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  struct Settings {
    bool nan_check = false;      // see nan_check.h
    bool blocking_wait = false;  // wait() blocks its caller, not only its stream
    ProfilerTitles titles;
  };

  // hook, success_hooks: the group's; the issuer registers each operation with them.
  OperationIssuer(std::shared_ptr<Group> group, Devices devices, std::shared_ptr<Poison> poison,
                  std::optional<c10::Device> bound_device, std::shared_ptr<CompletionHook> hook,
                  std::shared_ptr<SuccessHooks> success_hooks, Settings settings);

  // Within a block of this thread's: collects it. ValueError where its tensors are not all on one
  // device that is served.
  WorkPtr submit(PreparedCall call);
  bool collecting() { return coalescing_.collecting(); }  // this thread is, in a block
  // On that device. chosen: by the caller, as an index; see Devices::forBarrier().
  WorkPtr submitBarrier(PreparedCall call, const std::vector<int64_t>& chosen);

  void startBlock();
  WorkPtr endBlock();  // null: there was none

  // Later operations get this beside their limits; see ephemeral_timeouts.h.
  void addTime(Duration extra) { extra_time_.add(extra); }
  void enableTiming() { placement_.enableTiming(); }
  const Devices& devices() const { return placement_.devices(); }
  // Of DDP's buckets that are reduced in this group.
  BucketLayouts& bucketLayouts() { return bucket_layouts_; }
  // Collectives issued since a generation began.
  uint64_t issued() const { return issued_.load(std::memory_order_relaxed); }
  void countAnew() { issued_.store(0, std::memory_order_relaxed); }

 private:
  // keys: of Works that end with this one.
  WorkPtr issue(PreparedCall call, const c10::Device& device, SuccessHooks::Keys keys = {});
  WorkPtr issueBlock(Coalescing::Collected& collected);
  void complete(Prepared& prepared);
  void put(const c10::Device& device, Prepared& prepared);  // among the device's streams
  std::optional<BucketTag> bucketOf(const Prepared& prepared) const;
  Operation operationOf(Prepared& prepared, const c10::Device& device);
  FtWork::States issueInGroup(std::vector<Operation> operations);
  std::optional<DeviceCompletion> completionOf(DeviceCompletion::Sides sides, c10d::OpType type,
                                               std::vector<std::shared_ptr<void>> tensors) const;
  void checkForNan(const Prepared& prepared);  // host memory

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<CompletionHook> hook_;
  const std::shared_ptr<SuccessHooks> success_hooks_;
  const Settings settings_;
  DevicePlacement placement_;
  BucketLayouts bucket_layouts_;
  Coalescing coalescing_;
  EphemeralTimeouts extra_time_;
  std::atomic<uint64_t> issued_{0};  // any thread
};

}  // namespace torchft_ext
