// Data-parallel training of any torch::nn::Module, like torch.nn.parallel.DistributedDataParallel
// in Python, which libtorch lacks. Gradients are averaged over the group's ranks in buckets, while
// backward() is running.
//
//   torchft_ext::DistributedDataParallel ddp(network, group);
//   auto output = ddp.forward([&] { return network->forward(images); });
//   loss(output, labels).backward();   // .grad() of every parameter is the mean over all ranks
//   optimizer.step();
//
// Generations: the first forward() in a generation makes new buckets, on all members. So the object
// of a newcomer works together with those that have trained for long. (Python's DDP uses the same
// code to follow generations.) If a member is lost, backward() throws a CommError
// (torchft_ext/error.h) on all others. The gradients are then invalid: call zero_grad(), and run
// the step again in the next generation. A backward() whose forward() ran in an older generation
// throws CommAbortedError. The program itself must bring the parameters to a newcomer: by a
// broadcast, or from a checkpoint.
//
// On a device backward() returns before the sums are complete. check(group) waits for them, and
// throws if one failed: call it before the optimizer's step.
//
// All members must have the same parameters in the same order, the same options, and must
// synchronise gradients in the same forward() calls. If buckets differ, backward() throws
// MismatchError.
//
// Ownership: the object keeps the module and the group. Destroy it only after every backward() has
// ended. Threads: one at a time; forward() and backward() of one object must not run at the same
// time. Blocks: the constructor and forward() in broadcasts, backward() until the sums are
// complete; the group's timeout limits each. With the same data and options, gradients are bit by
// bit those of Python's DDP.
//
// It has no static_graph, no mixed precision, no communication hooks, and no join() for uneven
// inputs. Modules on one device.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchft_ext/torch/process_group.h"

namespace torchft_ext {

// As those of Python's class.
struct DdpOptions {
  // Of a bucket; nullopt: 25 MiB, and 1 MiB of the first.
  std::optional<int64_t> bucket_bytes = std::nullopt;
  bool broadcast_buffers = true;  // rank 0's buffers to all, before each forward() that trains
  bool init_sync = true;          // rank 0's parameters to all, in the constructor
  bool find_unused_parameters = false;   // some get no gradient in some steps
  bool gradient_as_bucket_view = false;  // saves one copy of the gradients
};

class NoSyncGuard;

class DistributedDataParallel {
 public:
  // All members of the generation call it at the same time. In a group of one process it waits for
  // no other: a newcomer makes its object there, and then joins. Throws std::invalid_argument for a
  // group of another library, and c10::ValueError for a module without parameters to train.
  DistributedDataParallel(std::shared_ptr<torch::nn::Module> module, const ProcessGroupPtr& group,
                          const DdpOptions& options = {});
  template <typename Contained>
  DistributedDataParallel(const torch::nn::ModuleHolder<Contained>& module,
                          const ProcessGroupPtr& group, const DdpOptions& options = {})
      : DistributedDataParallel(module.ptr(), group, options) {}
  ~DistributedDataParallel();
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  // Calls `call`, which runs the module's forward, and returns its result: a tensor, or a vector,
  // map, pair, tuple or optional of such results. This class finds no tensors in other types. If
  // gradients are off, it only calls.
  template <typename Forward>
  auto forward(Forward&& call) {
    begin();
    auto output = std::forward<Forward>(call)();
    std::vector<at::Tensor*> tensors;
    collect(output, tensors);
    end(tensors);
    return output;
  }

  // While the guard lives, forward() and the backward() after it only add to the gradients of this
  // process. The next synchronised backward() sends the accumulated gradients.
  [[nodiscard]] NoSyncGuard noSync();

  const std::shared_ptr<torch::nn::Module>& module() const;

 private:
  friend class NoSyncGuard;
  struct Impl;

  template <typename Output>
  static void collect(Output& output, std::vector<at::Tensor*>& tensors);
  void begin();
  // Tensors may be replaced.
  void end(const std::vector<at::Tensor*>& outputs);
  bool synchronise(bool on);  // returns what was so far

  const std::unique_ptr<Impl> impl_;
};

// Of noSync(). Must not outlive the object.
class NoSyncGuard {
 public:
  explicit NoSyncGuard(DistributedDataParallel& ddp) : ddp_(ddp), before_(ddp.synchronise(false)) {}
  ~NoSyncGuard() { ddp_.synchronise(before_); }
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;

 private:
  DistributedDataParallel& ddp_;
  const bool before_;
};

inline NoSyncGuard DistributedDataParallel::noSync() {
  return NoSyncGuard(*this);
}

namespace detail {

template <typename T>
struct IsTuple : std::false_type {};
template <typename... Items>
struct IsTuple<std::tuple<Items...>> : std::true_type {};
template <typename First, typename Second>
struct IsTuple<std::pair<First, Second>> : std::true_type {};

template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};

template <typename T>
struct IsVector : std::false_type {};
template <typename T>
struct IsVector<std::vector<T>> : std::true_type {};

template <typename T>
struct IsMap : std::false_type {};
template <typename Key, typename T>
struct IsMap<std::map<Key, T>> : std::true_type {};

}  // namespace detail

template <typename Output>
void DistributedDataParallel::collect(Output& output, std::vector<at::Tensor*>& tensors) {
  if constexpr (std::is_same_v<Output, at::Tensor>) {
    tensors.push_back(&output);
  } else if constexpr (detail::IsTuple<Output>::value) {
    std::apply([&tensors](auto&... items) { (collect(items, tensors), ...); }, output);
  } else if constexpr (detail::IsOptional<Output>::value) {
    if (output) collect(*output, tensors);
  } else if constexpr (detail::IsVector<Output>::value) {
    if constexpr (!std::is_same_v<Output, std::vector<bool>>) {
      for (auto& item : output) collect(item, tensors);
    }
  } else if constexpr (detail::IsMap<Output>::value) {
    for (auto& [key, item] : output) collect(item, tensors);
  }
}

}  // namespace torchft_ext
