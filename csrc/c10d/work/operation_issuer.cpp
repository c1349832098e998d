#include "c10d/work/operation_issuer.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "c10d/adapter/nan_check.h"
#include "c10d/adapter/staging.h"
#include "comm/callback_path.h"

namespace torchft_ext {
namespace {

using TensorVector = std::vector<at::Tensor>;

// The engine lets go of tensors on its own thread.
void releaseAll(std::shared_ptr<void> kept) {
  releaseElsewhere(std::move(*std::static_pointer_cast<TensorVector>(std::move(kept))));
}

std::shared_ptr<TensorShelf> keepUntilReleased(TensorVector tensors) {
  return std::make_shared<TensorShelf>(std::make_shared<TensorVector>(std::move(tensors)),
                                       releaseAll);
}

// On a device the callers' tensors go when it has been waited for.
std::shared_ptr<void> ownersOf(Prepared& prepared) {
  auto shelf = keepUntilReleased(std::move(prepared.tensors));
  if (prepared.side) prepared.side->shelf = shelf;
  return std::make_shared<std::pair<std::shared_ptr<TensorShelf>, std::shared_ptr<TensorShelf>>>(
      std::move(shelf), keepUntilReleased(std::move(prepared.kept)));
}

TensorVector allTensors(const std::vector<Prepared>& prepared) {
  TensorVector all;
  for (const Prepared& one : prepared)
    all.insert(all.end(), one.tensors.begin(), one.tensors.end());
  return all;
}

// A Work waits on the host, or on the current stream of one device. A barrier says where it is.
void checkInOnePlace(const std::vector<Prepared>& prepared, const c10::Device& device) {
  const auto placeOf = [&device](const Prepared& one) {
    return one.side ? one.side->current.device() : device;
  };
  const c10::Device first = placeOf(prepared.front());
  for (const Prepared& one : prepared) {
    TORCH_CHECK_VALUE(placeOf(one) == first, "coalesced block: expected all its operations on ",
                      first.str(), ", found a ", toString(one.operation.kind), " on ",
                      placeOf(one).str(), ": issue it outside of the block");
  }
}

Shape shapeOf(const TensorVector& tensors) {
  Shape shape;
  shape.dimensions = 0;
  if (tensors.empty()) return shape;
  const bool alike = std::all_of(tensors.begin(), tensors.end(), [&tensors](const auto& tensor) {
    return tensor.sizes() == tensors.front().sizes();
  });
  if (!alike) return Shape{};  // counted from the buffers
  if (tensors.size() > 1) shape.add(static_cast<int64_t>(tensors.size()));
  for (const int64_t size : tensors.front().sizes()) shape.add(size);
  return shape;
}

// Of a call that is one operation; the others' are counted from their buffers.
void setShapes(PreparedCall& call) {
  if (call.operations.size() != 1) return;
  Operation& operation = call.operations.front().operation;
  if (call.described.inputs) operation.input_shape = shapeOf(*call.described.inputs);
  if (call.described.outputs.size() == 1)
    operation.output_shape = shapeOf(call.described.outputs.front());
}

// On the caller's own stream whatever comes later is behind the operation.
void releaseOnCurrent(const DeviceCompletion::Sides& sides) {
  for (const auto& side : sides) {
    const auto shelf = side->on_current && side->may_release ? side->shelf.lock() : nullptr;
    if (shelf) shelf->release();
  }
}

// Where torch keeps works in its registry: the block's, in place of those of its operations.
void registerBlock(const TensorVector& tensors, const c10::intrusive_ptr<c10d::Work>& work) {
  if (!c10d::allow_inflight_collective_as_graph_input()) return;
  for (const at::Tensor& tensor : tensors) c10d::register_work(tensor, work);
}

}  // namespace

OperationIssuer::OperationIssuer(std::shared_ptr<Group> group, Devices devices,
                                 std::shared_ptr<Poison> poison,
                                 std::optional<c10::Device> bound_device,
                                 std::shared_ptr<CompletionHook> hook,
                                 std::shared_ptr<SuccessHooks> success_hooks, Settings settings)
    : group_(std::move(group)),
      hook_(std::move(hook)),
      success_hooks_(std::move(success_hooks)),
      settings_(std::move(settings)),
      placement_(std::move(devices), std::move(poison), settings_.nan_check, bound_device) {}

OperationIssuer::WorkPtr OperationIssuer::submit(PreparedCall call) {
  for (Prepared& one : call.operations) complete(one);
  const c10::Device device =
      devices().of(toString(call.operations.front().operation.kind), allTensors(call.operations));
  if (!device.is_cpu() && coalescing_.collecting()) {
    // Each comes behind what its caller has enqueued on the stream that is current now.
    for (Prepared& one : call.operations) put(device, one);
  }
  if (WorkPtr work = coalescing_.collect(call.operations, call.described)) return work;
  return issue(std::move(call), device);
}

OperationIssuer::WorkPtr OperationIssuer::submitBarrier(PreparedCall call,
                                                        const std::vector<int64_t>& chosen) {
  if (const auto device = placement_.forBarrier(chosen))
    placement_.place(*device, call.operations.front());
  return submit(std::move(call));
}

void OperationIssuer::complete(Prepared& prepared) {
  Operation& operation = prepared.operation;
  if (operation.timeout <= Duration::zero()) operation.timeout = group_->timeout();
  operation.timeout = extra_time_.onTopOf(operation.timeout);
  const std::optional<BucketTag> bucket = bucketOf(prepared);
  if (!bucket) return;
  operation.layout = bucket->layout;
  if (bucket->generation >= 0) operation.generation = bucket->generation;
}

std::optional<BucketTag> OperationIssuer::bucketOf(const Prepared& prepared) const {
  if (prepared.bucket) return prepared.bucket;
  if (prepared.operation.kind == OpKind::kAllreduce) {
    if (const auto tag = bucket_layouts_.of(prepared.tensors.front())) return tag;
  }
  // What a hook's callbacks issue is named after the operation whose future they belong to.
  const BucketScope* scope = CallbackScope::present() ? nullptr : BucketScope::current();
  if (scope == nullptr || !scope->isOf(bucket_layouts_)) return std::nullopt;
  return scope->tag();
}

OperationIssuer::WorkPtr OperationIssuer::issue(PreparedCall call, const c10::Device& device,
                                                SuccessHooks::Keys keys) {
  checkInOnePlace(call.operations, device);
  setShapes(call);
  std::vector<Operation> operations;
  DeviceCompletion::Sides sides;
  std::vector<std::shared_ptr<void>> tensors;
  operations.reserve(call.operations.size());
  for (Prepared& one : call.operations) {
    operations.push_back(operationOf(one, device));
    if (!one.side) continue;
    sides.push_back(one.side);
    tensors.push_back(operations.back().keep_alive);
  }
  FtWork::States states = issueInGroup(std::move(operations));
  releaseOnCurrent(sides);
  auto completion = completionOf(std::move(sides), call.described.type, std::move(tensors));
  extra_time_.issued(states.back());
  hook_->watch(call.described.type, states, completion);
  call.described.title = settings_.titles.of(call.described.title);
  auto work = c10::make_intrusive<FtWork>(std::move(call.described), states, completion);
  keys.push_back(work->key());
  success_hooks_->watch(keys, states, completion);
  return work;
}

// Once for each operation; again: nothing.
void OperationIssuer::put(const c10::Device& device, Prepared& prepared) {
  if (prepared.side || prepared.operation.staged) return;
  if (const auto& staged = devices().staged()) {
    stage(prepared, device, *staged, settings_.nan_check);
  } else {
    placement_.place(device, prepared);
  }
}

Operation OperationIssuer::operationOf(Prepared& prepared, const c10::Device& device) {
  if (settings_.nan_check && device.is_cpu()) checkForNan(prepared);
  if (!device.is_cpu()) put(device, prepared);
  if (!prepared.side && !prepared.operation.staged) {
    prepared.operation.loads = loadsOf(prepared.loads);
    prepared.operation.stores = storesOf(prepared.stores);
  }
  // What callbacks issue is not in the order that all ranks count alike.
  const bool nested = !prepared.side && CallbackScope::isNamed();
  if (isCollective(prepared.operation.kind) && !nested)
    issued_.fetch_add(1, std::memory_order_relaxed);
  prepared.operation.keep_alive = ownersOf(prepared);
  return std::move(prepared.operation);
}

FtWork::States OperationIssuer::issueInGroup(std::vector<Operation> operations) {
  if (operations.size() > 1) return group_->issueTogether(std::move(operations));
  FtWork::States states;
  states.push_back(group_->issue(std::move(operations.front())));
  return states;
}

std::optional<DeviceCompletion> OperationIssuer::completionOf(
    DeviceCompletion::Sides sides, c10d::OpType type,
    std::vector<std::shared_ptr<void>> tensors) const {
  if (sides.empty()) return std::nullopt;
  const bool host_waits = type == c10d::OpType::BARRIER || settings_.blocking_wait;
  const c10::Device where = sides.front()->current.device();
  DeviceCompletion completion(where, std::move(sides), host_waits, devices().platform());
  completion.keepIfCaptured(std::move(tensors));
  return completion;
}

void OperationIssuer::checkForNan(const Prepared& prepared) {
  if (!holdsNan(contributionsOf(prepared))) return;
  group_->abortGeneration(prepared.operation.generation, nanFound(prepared.operation.kind));
}

void OperationIssuer::startBlock() {
  coalescing_.start();
}

OperationIssuer::WorkPtr OperationIssuer::endBlock() {
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

OperationIssuer::WorkPtr OperationIssuer::issueBlock(Coalescing::Collected& collected) {
  const c10::Device device = devices().of("coalesced block", allTensors(collected.operations));
  PreparedCall block{std::move(collected.operations),
                     {c10d::OpType::COALESCED, "ft:coalesced", std::nullopt, {}}};
  TensorVector registered;
  for (Described& one : collected.described) {
    for (TensorVector& outputs : one.outputs) {
      registered.insert(registered.end(), outputs.begin(), outputs.end());
      block.described.outputs.push_back(std::move(outputs));
    }
  }
  SuccessHooks::Keys keys;
  for (const auto& one : collected.works) keys.push_back(one->key());
  WorkPtr work = issue(std::move(block), device, std::move(keys));
  collected.block->set(work);
  registerBlock(registered, work);
  return work;
}

}  // namespace torchft_ext
