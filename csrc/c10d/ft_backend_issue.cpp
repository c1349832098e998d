// From the arguments of an operation to its Work: prepared, placed on a device, and issued, one by
// one or as a block.
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "c10d/device_arguments.h"
#include "c10d/device_completion.h"
#include "c10d/ft_backend.h"
#include "c10d/nan_check.h"
#include "c10d/poison.h"
#include "c10d/premul_sum.h"
#include "comm/callback_path.h"
#include "comm/callbacks.h"
#include "nccl/device_comm.h"

namespace torchft_ext {
namespace {

using TensorVector = std::vector<at::Tensor>;

// The engine lets go of tensors on its own thread.
void letGoOfAll(std::shared_ptr<void> kept) {
  letGoElsewhere(std::move(*std::static_pointer_cast<TensorVector>(std::move(kept))));
}

std::shared_ptr<Stash> keepUntilReleased(TensorVector tensors) {
  return std::make_shared<Stash>(std::make_shared<TensorVector>(std::move(tensors)), letGoOfAll);
}

TensorVector allTensors(const std::vector<Prepared>& prepared) {
  TensorVector all;
  for (const Prepared& one : prepared)
    all.insert(all.end(), one.tensors.begin(), one.tensors.end());
  return all;
}

// Where torch keeps works in its registry: the block's, in place of those of its operations.
void registerBlock(const TensorVector& tensors, const c10::intrusive_ptr<c10d::Work>& work) {
  if (!c10d::allow_inflight_collective_as_graph_input()) return;
  for (const at::Tensor& tensor : tensors) c10d::register_work(tensor, work);
}

bool reduces(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}

}  // namespace

FtBackend::Place FtBackend::enter() const {
  guard_.check("this process group");
  while (true) {
    const int64_t epoch = group_->epoch();
    const Place place{epoch, currentRank(), currentSize()};
    if (group_->epoch() == epoch) return place;
  }
}

Prepared FtBackend::prepare(const Place& place, OpKind kind, Milliseconds timeout,
                            bool async) const {
  Prepared prepared;
  prepared.rank = place.rank;
  prepared.async = async;
  prepared.operation.kind = kind;
  prepared.operation.epoch = place.epoch;
  prepared.operation.timeout = timeout.count() > 0 ? durationOf(timeout) : group_->timeout();
  prepared.operation.timeout = extra_time_.onTopOf(prepared.operation.timeout);
  // What a hook's callbacks issue is named after the operation whose future they belong to.
  const BucketScope* scope = CallbackScope::present() ? nullptr : BucketScope::current();
  if (scope != nullptr && scope->isOf(bucket_layouts_)) markAs(prepared, scope->tag());
  return prepared;
}

void FtBackend::markAs(Prepared& prepared, const BucketTag& tag) {
  prepared.operation.layout = tag.layout;
  if (tag.epoch >= 0) prepared.operation.epoch = tag.epoch;
}

void FtBackend::setReduction(Prepared& prepared, const Argument& argument, const at::Tensor& tensor,
                             const c10d::ReduceOp& reduce_op) const {
  Operation& operation = prepared.operation;
  if (tensor.device().is_cpu() || !devices_.platform()) {
    const Reduction reduction = reductionOf(argument, tensor, reduce_op);
    operation.dtype = reduction.dtype;
    operation.reduce = reduction.kind;
  } else {
    const DeviceReduction reduction =
        deviceReductionOf(argument, tensor, reduce_op, *devices_.platform()->nccl);
    operation.dtype = reduction.dtype;
    operation.reduce = reduction.kind;
    prepared.low_bit = reduction.low_bit;
  }
  if (operation.reduce != ReduceKind::kPreMulSum) return;
  Factor factor = factorOf(argument, tensor, operation.dtype, reduce_op);
  operation.factor = factor.item;
  if (factor.on_device.defined()) operation.factor_on_device = factor.on_device.const_data_ptr();
  prepared.factor = std::move(factor.on_device);
}

FtBackend::WorkPtr FtBackend::submit(Prepared prepared, Described described) {
  std::vector<Prepared> one;
  one.push_back(std::move(prepared));
  return submitAll(std::move(one), std::move(described));
}

FtBackend::WorkPtr FtBackend::submitAll(std::vector<Prepared> prepared, Described described) {
  const c10::Device device =
      devices_.of(toString(prepared.front().operation.kind), allTensors(prepared));
  if (!device.is_cpu() && coalescing_.collecting()) {
    // Each comes behind what its caller has enqueued on the stream that is current now.
    for (Prepared& one : prepared)
      if (!one.side) placeOn(device, one);
  }
  if (WorkPtr work = coalescing_.collect(prepared, described)) return work;
  return issueAll(std::move(prepared), std::move(described), device);
}

FtBackend::WorkPtr FtBackend::issueAll(std::vector<Prepared> prepared, Described described,
                                       const c10::Device& device) {
  std::vector<Operation> operations;
  DeviceCompletion::Sides sides;
  std::vector<std::shared_ptr<void>> tensors;
  operations.reserve(prepared.size());
  checkInOnePlace(prepared, device);
  for (Prepared& one : prepared) {
    if (nan_check_ && device.is_cpu()) checkForNan(one);
    if (!one.side && !device.is_cpu()) placeOn(device, one);
    if (one.side) sides.push_back(one.side);
    if (!one.side) {
      one.operation.loads = loadsOf(one.loads);
      one.operation.stores = storesOf(one.stores);
    }
    const OpKind kind = one.operation.kind;
    // What callbacks issue is not in the order that all ranks count alike.
    const bool nested = !one.side && CallbackScope::isNamed();
    if (isCollective(kind) && !nested) sequence_.fetch_add(1, std::memory_order_relaxed);
    one.operation.keep_alive = ownersOf(one);
    if (one.side) tensors.push_back(one.operation.keep_alive);
    operations.push_back(std::move(one.operation));
  }
  FtWork::States states;
  if (operations.size() == 1) {
    states.push_back(group_->issue(std::move(operations.front())));
  } else {
    states = group_->issueTogether(std::move(operations));
  }
  for (const auto& side : sides) {
    // On the caller's own stream whatever comes later is behind the operation.
    const auto stash = side->on_current && side->may_release ? side->stash.lock() : nullptr;
    if (stash) stash->release();
  }
  std::optional<DeviceCompletion> completion;
  if (!sides.empty()) {
    const bool host_waits = described.type == c10d::OpType::BARRIER || options_->blocking_wait;
    const c10::Device where = sides.front()->current.device();
    completion.emplace(where, std::move(sides), host_waits, devices_.platform()->cuda);
    completion->keepIfCaptured(std::move(tensors));
  }
  extra_time_.issued(states.back());
  hook_->watch(described.type, states, completion);
  return c10::make_intrusive<FtWork>(std::move(described), std::move(states),
                                     std::move(completion));
}

// A Work waits on the host, or on the current stream of one device. A barrier says where it is.
void FtBackend::checkInOnePlace(const std::vector<Prepared>& prepared, const c10::Device& device) {
  for (const Prepared& one : prepared) {
    const c10::Device place = one.side ? one.side->current.device() : device;
    const c10::Device first =
        prepared.front().side ? prepared.front().side->current.device() : device;
    TORCH_CHECK_VALUE(place == first, "coalesced block: expected all its operations on ",
                      first.str(), ", found a ", toString(one.operation.kind), " on ", place.str(),
                      ": issue it outside of the block");
  }
}

// On a device the callers' tensors go when it has been waited for.
std::shared_ptr<void> FtBackend::ownersOf(Prepared& prepared) {
  auto stash = keepUntilReleased(std::move(prepared.tensors));
  if (prepared.side) prepared.side->stash = stash;
  return std::make_shared<std::pair<std::shared_ptr<Stash>, std::shared_ptr<Stash>>>(
      std::move(stash), keepUntilReleased(std::move(prepared.kept)));
}

void FtBackend::checkForNan(const Prepared& prepared) {
  if (!holdsNan(contributionsOf(prepared))) return;
  group_->abortEpoch(prepared.operation.epoch, nanFound(prepared.operation.kind));
}

// ---------------------------------------------------------------- device tensors

void FtBackend::placeOn(const c10::Device& device, Prepared& prepared) const {
  // A barrier may be what uses the device first: its byte comes from an allocator that has to be
  // there.
  if (device.is_cuda()) at::globalContext().lazyInitDevice(device.type());
  const OnDevice on_device(device);
  Operation& operation = prepared.operation;
  if (!reduces(operation.kind)) operation.dtype = movable(operation.dtype);
  at::Tensor flag;
  if (poison_ && !operation.outputs.empty()) {
    const auto relaxed = devices_.platform()->cuda->relaxCapture();  // it may be made here
    flag = poison_->flagOf(operation.epoch);
  }
  auto side = std::make_shared<StreamSide>(currentStream(device));
  side->on_current = !prepared.async;
  side->timed = timed_.load(std::memory_order_relaxed);
  side->flat = prepared.flat;
  if (!prepared.loads.empty()) {
    side->ahead = [loads = prepared.loads](const c10::Stream& stream) {
      const c10::StreamGuard guard(stream);
      enqueueLoads(loads);
    };
  }
  side->behind = behind(device, prepared, flag);
  if (nan_check_) {
    // Pinned memory for the answer, whose allocator asks events and may make some.
    const auto relaxed = devices_.platform()->cuda->relaxCapture();
    side->verdict = verdictOn(prepared, side->current);
  }
  noteUse(device);
  if (flag.defined()) prepared.kept.push_back(std::move(flag));
  if (prepared.factor.defined()) prepared.kept.push_back(std::move(prepared.factor));
  prepared.side = side;
  operation.device = std::move(side);
}

void FtBackend::noteUse(const c10::Device& device) const {
  int before = kNoDevice;
  if (device_used_.compare_exchange_strong(before, device.index())) return;
  if (before != device.index()) device_used_.store(kSeveralDevices);
}

std::optional<c10::Device> FtBackend::deviceUsed() const {
  const int index = device_used_.load();
  if (index < 0) return std::nullopt;
  return c10::Device(devices_.platform()->device_type, static_cast<c10::DeviceIndex>(index));
}

std::function<void(const c10::Stream&)> FtBackend::behind(const c10::Device& device,
                                                          const Prepared& prepared,
                                                          const at::Tensor& poison_flag) const {
  const bool low_bit = prepared.low_bit;
  if (!low_bit && !poison_flag.defined() && prepared.stores.empty()) return {};
  return [device, outputs = prepared.operation.outputs, stores = prepared.stores, low_bit,
          poison_flag](const c10::Stream& stream) {
    const c10::StreamGuard guard(stream);
    if (low_bit) enqueueLowBits(outputs, device);
    if (poison_flag.defined()) enqueuePoison(outputs, poison_flag, device);
    enqueueStores(stores);
  };
}

// Enqueues on the stream that the operation's own waits for.
std::function<std::string()> FtBackend::verdictOn(const Prepared& prepared,
                                                  const c10::Stream& stream) const {
  if (devices_.platform()->cuda->capturing(stream)) return {};
  const std::vector<at::Tensor> contributions = contributionsOf(prepared);
  if (contributions.empty()) return {};
  return [found = enqueueNanCheck(contributions), kind = prepared.operation.kind] {
    return found() ? nanFound(kind) : std::string();
  };
}

void FtBackend::startCoalescing() {
  guard_.check("this process group");
  coalescing_.start();
}

FtBackend::WorkPtr FtBackend::endCoalescing() {
  guard_.check("this process group");
  Coalescing::Collected collected = coalescing_.end();
  if (collected.operations.empty()) return nullptr;
  for (const auto& work : collected.works) work->leaveRegistry();
  try {
    return issueBlock(collected);
  } catch (...) {
    collected.block->fail(std::current_exception());
    throw;
  }
}

FtBackend::WorkPtr FtBackend::issueBlock(Coalescing::Collected& collected) {
  const c10::Device device = devices_.of("coalesced block", allTensors(collected.operations));
  Described described{c10d::OpType::COALESCED, "ft:coalesced", std::nullopt, {}};
  Tensors registered;
  for (Described& one : collected.described) {
    for (Tensors& outputs : one.outputs) {
      registered.insert(registered.end(), outputs.begin(), outputs.end());
      described.outputs.push_back(std::move(outputs));
    }
  }
  WorkPtr work = issueAll(std::move(collected.operations), std::move(described), device);
  collected.block->set(work);
  registerBlock(registered, work);
  return work;
}

}  // namespace torchft_ext
