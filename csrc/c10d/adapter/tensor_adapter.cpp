// Collectives that reduce or gather, and what all operations have in common.
#include "c10d/adapter/tensor_adapter.h"

#include <utility>

#include "c10d/adapter/device_arguments.h"
#include "c10d/adapter/premul_sum.h"
#include "c10d/adapter/sparse_allreduce.h"
#include "comm/callback_path.h"

namespace torchft_ext {

using c10d::OpType;

std::optional<std::vector<at::Tensor>> TensorAdapter::shown(const Tensors& tensors) {
  return tensors;
}

PreparedCall TensorAdapter::callOf(Prepared prepared, Described described) {
  PreparedCall call{{}, std::move(described)};
  call.operations.push_back(std::move(prepared));
  return call;
}

PreparedCall TensorAdapter::callOf(std::vector<Prepared> prepared, Described described) {
  return {std::move(prepared), std::move(described)};
}

Prepared TensorAdapter::prepare(OpKind kind, std::chrono::milliseconds timeout, bool async) const {
  Prepared prepared;
  prepared.rank = place_.rank;
  prepared.async = async;
  prepared.operation.kind = kind;
  prepared.operation.generation = place_.generation;
  if (timeout.count() > 0) prepared.operation.timeout = durationOf(timeout);
  return prepared;
}

void TensorAdapter::setReduction(Prepared& prepared, const Argument& argument,
                                 const at::Tensor& tensor, const c10d::ReduceOp& reduce_op) const {
  Operation& operation = prepared.operation;
  if (tensor.device().is_cpu() || platform_ == nullptr) {
    const CheckedReduction reduction = reductionOf(argument, tensor, reduce_op);
    operation.dtype = reduction.dtype;
    operation.reduce = reduction.kind;
  } else {
    const DeviceReduction reduction = deviceReductionOf(argument, tensor, reduce_op, *platform_);
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

PreparedCall TensorAdapter::broadcast(const Tensors& tensors,
                                      const c10d::BroadcastOptions& options) const {
  checkOutputs({"broadcast", "tensors"}, tensors, 1);
  checkRank({"broadcast", "root rank"}, options.rootRank, place_.size);
  TORCH_CHECK_VALUE(options.rootTensor == 0, "broadcast: root tensor: expected 0, found ",
                    options.rootTensor);
  Prepared prepared = prepare(OpKind::kBroadcast, options.timeout, options.asyncOp);
  const bool root = place_.rank == options.rootRank;
  const at::Tensor tensor =
      prepared.writableFor(tensors[0], root ? Prepared::Use::kRead : Prepared::Use::kWritten);
  prepared.operation.dtype = dtypeOfData(tensor);
  prepared.operation.root = static_cast<int>(options.rootRank);
  prepared.operation.outputs = {writable(tensor)};
  return callOf(std::move(prepared),
                {OpType::BROADCAST, "ft:broadcast", shown(tensors), {tensors}});
}

Prepared TensorAdapter::allreduceOf(const Argument& argument, const at::Tensor& tensor,
                                    const c10d::AllreduceOptions& options) const {
  if (tensor.defined() && tensor.layout() == at::kSparse)
    return sparseAllreduceOf(argument, tensor, options);
  checkOutput(argument, tensor);
  Prepared prepared = prepare(OpKind::kAllreduce, options.timeout, options.asyncOp);
  setReduction(prepared, argument, tensor, options.reduceOp);
  prepared.operation.outputs = {writable(prepared.writableFor(tensor, Prepared::Use::kBoth))};
  return prepared;
}

Prepared TensorAdapter::sparseAllreduceOf(const Argument& argument, const at::Tensor& tensor,
                                          const c10d::AllreduceOptions& options) const {
  checkSparse(argument, tensor, options.reduceOp);
  // It takes several exchanges, for which a place in the threads' order is needed.
  TORCH_CHECK_VALUE(!CallbackScope::present(), argument.text(),
                    ": expected a dense tensor in a callback of a future, found a sparse one: sum "
                    "it on the thread that waits for the future");
  const DType dtype = reductionOf(argument, tensor, options.reduceOp).dtype;
  Prepared prepared = prepare(OpKind::kSparseAllreduce, options.timeout, options.asyncOp);
  const auto exchanges =
      std::make_shared<SparseAllreduce>(tensor, dtype, place_.rank, place_.size, releaseElsewhere);
  exchanges->layOut(prepared.operation);
  prepared.operation.dtype = dtype;
  prepared.operation.exchanges = exchanges;
  prepared.given = exchanges->values();
  prepared.tensors = {tensor};
  return prepared;
}

PreparedCall TensorAdapter::allreduce(const Tensors& tensors,
                                      const c10d::AllreduceOptions& options) const {
  const Argument argument{"allreduce", "tensors"};
  checkCount(argument, tensors.size(), 1);
  if (tensors[0].defined() && tensors[0].layout() == at::kSparse) {
    return callOf(sparseAllreduceOf(argument.at(0), tensors[0], options),
                  {OpType::_ALLREDUCE_SPARSE, "ft:sparse_all_reduce", shown(tensors), {tensors}});
  }
  return callOf(allreduceOf(argument.at(0), tensors[0], options),
                {OpType::ALLREDUCE, "ft:all_reduce", shown(tensors), {tensors}});
}

PreparedCall TensorAdapter::allreduceCoalesced(
    const Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) const {
  const Argument argument{"allreduce_coalesced", "tensors"};
  TORCH_CHECK_VALUE(!tensors.empty(), argument.text(),
                    ": expected at least one tensor, found none");
  std::vector<Prepared> prepared;
  prepared.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    prepared.push_back(allreduceOf(argument.at(i), tensors[i], options));
  }
  return callOf(
      std::move(prepared),
      {OpType::ALLREDUCE_COALESCED, "ft:all_reduce_coalesced", shown(tensors), {tensors}});
}

PreparedCall TensorAdapter::reduce(const Tensors& tensors,
                                   const c10d::ReduceOptions& options) const {
  const Argument argument{"reduce", "tensors"};
  checkOutputs(argument, tensors, 1);
  checkRank({"reduce", "root rank"}, options.rootRank, place_.size);
  TORCH_CHECK_VALUE(options.rootTensor == 0, "reduce: root tensor: expected 0, found ",
                    options.rootTensor);
  Prepared prepared = prepare(OpKind::kReduce, options.timeout, options.asyncOp);
  setReduction(prepared, argument.at(0), tensors[0], options.reduceOp);
  prepared.operation.root = static_cast<int>(options.rootRank);
  const bool root = place_.rank == options.rootRank;
  const at::Tensor tensor =
      prepared.writableFor(tensors[0], root ? Prepared::Use::kBoth : Prepared::Use::kRead);
  prepared.operation.inputs = {readable(tensor)};
  if (root) prepared.operation.outputs = {writable(tensor)};
  return callOf(std::move(prepared), {OpType::REDUCE, "ft:reduce", shown(tensors), {tensors}});
}

Prepared TensorAdapter::allgatherOf(const Argument& outs, const Tensors& outputs,
                                    const Argument& in, const at::Tensor& input,
                                    const c10d::AllgatherOptions& options) const {
  checkOutputs(outs, outputs, static_cast<size_t>(place_.size));
  const at::Tensor given = asInput(in, input);
  const at::Tensor& mine = outputs[static_cast<size_t>(place_.rank)];
  checkSameDtype(outs.at(0), outputs[0], in, given);
  checkNumel(outs.at(static_cast<size_t>(place_.rank)), mine, given.numel(),
             "as this rank's input has");
  Prepared prepared = prepare(OpKind::kAllgather, options.timeout, options.asyncOp);
  const Tensors written = prepared.writableFor(outputs);
  const at::Tensor own = prepared.readableFor(
      given, written, written[static_cast<size_t>(place_.rank)].const_data_ptr());
  prepared.operation.dtype = dtypeOfData(own);
  prepared.operation.inputs = {readable(own)};
  for (const at::Tensor& output : written) prepared.operation.outputs.push_back(writable(output));
  return prepared;
}

PreparedCall TensorAdapter::allgather(const TensorLists& outputs, const Tensors& inputs,
                                      const c10d::AllgatherOptions& options) const {
  const Argument out{"allgather", "outputs"};
  const Argument in{"allgather", "inputs"};
  checkCount(in, inputs.size(), 1);
  checkCount(out, outputs.size(), 1);
  return callOf(allgatherOf(out.at(0), outputs[0], in.at(0), inputs[0], options),
                {OpType::ALLGATHER, "ft:all_gather", shown(inputs), outputs});
}

PreparedCall TensorAdapter::allgatherCoalesced(const TensorLists& outputs, const Tensors& inputs,
                                               const c10d::AllgatherOptions& options) const {
  // c10d has one list per rank here: outputs[rank][i] is what `rank` gave as inputs[i].
  const Argument out{"allgather_coalesced", "outputs"};
  const Argument in{"allgather_coalesced", "inputs"};
  TORCH_CHECK_VALUE(!inputs.empty(), in.text(), ": expected at least one tensor, found none");
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(place_.size), out.text(), ": expected ",
                    place_.size, " lists (one for each rank), found ", outputs.size());
  for (size_t rank = 0; rank < outputs.size(); ++rank)
    checkCount(out.at(rank), outputs[rank].size(), inputs.size());
  std::vector<Prepared> prepared;
  prepared.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors from_ranks;
    for (const Tensors& of_rank : outputs) from_ranks.push_back(of_rank[i]);
    prepared.push_back(allgatherOf(out, from_ranks, in.at(i), inputs[i], options));
  }
  return callOf(std::move(prepared),
                {OpType::ALLGATHER_COALESCED, "ft:all_gather", shown(inputs), outputs});
}

Prepared TensorAdapter::allgatherIntoOf(const Argument& out, const at::Tensor& output,
                                        const Argument& in, const at::Tensor& input,
                                        const c10d::AllgatherOptions& options) const {
  checkOutput(out, output);
  const at::Tensor given = asInput(in, input);
  checkSameDtype(out, output, in, given);
  checkNumel(out, output, given.numel() * place_.size, "world size times the input's");
  Prepared prepared = prepare(OpKind::kAllgather, options.timeout, options.asyncOp);
  const at::Tensor written = prepared.writableFor(output, Prepared::Use::kWritten);
  prepared.operation.outputs = cut(writable(written), place_.size);
  const at::Tensor own = prepared.readableFor(
      given, {written}, prepared.operation.outputs[static_cast<size_t>(place_.rank)].data);
  prepared.operation.dtype = dtypeOfData(own);
  prepared.operation.inputs = {readable(own)};
  prepared.flat = true;
  return prepared;
}

PreparedCall TensorAdapter::allgatherBase(const at::Tensor& output, const at::Tensor& input,
                                          const c10d::AllgatherOptions& options) const {
  return callOf(allgatherIntoOf({"_allgather_base", "output"}, output, {"_allgather_base", "input"},
                                input, options),
                {OpType::_ALLGATHER_BASE, "ft:_all_gather_base", shown({input}), {{output}}});
}

PreparedCall TensorAdapter::allgatherIntoCoalesced(const Tensors& outputs, const Tensors& inputs,
                                                   const c10d::AllgatherOptions& options) const {
  const Argument out{"allgather_into_tensor_coalesced", "outputs"};
  const Argument in{"allgather_into_tensor_coalesced", "inputs"};
  TORCH_CHECK_VALUE(!inputs.empty(), in.text(), ": expected at least one tensor, found none");
  checkCount(out, outputs.size(), inputs.size());
  std::vector<Prepared> prepared;
  prepared.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    prepared.push_back(allgatherIntoOf(out.at(i), outputs[i], in.at(i), inputs[i], options));
  }
  return callOf(std::move(prepared),
                {OpType::COALESCED, "ft:_all_gather_base", shown(inputs), {outputs}});
}

PreparedCall TensorAdapter::reduceScatter(const Tensors& outputs, const TensorLists& inputs,
                                          const c10d::ReduceScatterOptions& options) const {
  const Argument out{"reduce_scatter", "outputs"};
  const Argument in{"reduce_scatter", "inputs"};
  checkOutputs(out, outputs, 1);
  checkCount(in, inputs.size(), 1);
  checkCount(in.at(0), inputs[0].size(), static_cast<size_t>(place_.size));
  Prepared prepared = prepare(OpKind::kReduceScatter, options.timeout, options.asyncOp);
  setReduction(prepared, out.at(0), outputs[0], options.reduceOp);
  const Tensors written = prepared.writableFor(outputs);
  prepared.operation.outputs = {writable(written[0])};
  for (size_t i = 0; i < inputs[0].size(); ++i) {
    const at::Tensor given = asInput(in.at(0).at(i), inputs[0][i]);
    checkSameDtype(in.at(0).at(i), given, out.at(0), outputs[0]);
    // Parts may differ in size, the same on every rank.
    const bool own = i == static_cast<size_t>(place_.rank);
    if (own) checkNumel(in.at(0).at(i), given, outputs[0].numel(), "as the output has");
    const void* in_place = own ? written[0].const_data_ptr() : nullptr;
    prepared.operation.inputs.push_back(readable(prepared.readableFor(given, written, in_place)));
  }
  return callOf(std::move(prepared),
                {OpType::REDUCE_SCATTER, "ft:reduce_scatter", shown(inputs[0]), {outputs}});
}

Prepared TensorAdapter::reduceScatterFromOf(const Argument& out, const at::Tensor& output,
                                            const Argument& in, const at::Tensor& input,
                                            const c10d::ReduceScatterOptions& options) const {
  checkOutput(out, output);
  const at::Tensor given = asInput(in, input);
  checkSameDtype(in, given, out, output);
  checkNumel(in, given, output.numel() * place_.size, "world size times the output's");
  Prepared prepared = prepare(OpKind::kReduceScatter, options.timeout, options.asyncOp);
  const at::Tensor written = prepared.writableFor(output, Prepared::Use::kWritten);
  const size_t offset = static_cast<size_t>(place_.rank) * output.nbytes();
  const bool in_place =
      static_cast<const uint8_t*>(given.const_data_ptr()) + offset == written.const_data_ptr();
  const at::Tensor whole =
      prepared.readableFor(given, {written}, in_place ? given.const_data_ptr() : nullptr);
  setReduction(prepared, out, output, options.reduceOp);
  prepared.operation.inputs = cut(readable(whole), place_.size);
  prepared.operation.outputs = {writable(written)};
  prepared.flat = true;
  return prepared;
}

PreparedCall TensorAdapter::reduceScatterBase(const at::Tensor& output, const at::Tensor& input,
                                              const c10d::ReduceScatterOptions& options) const {
  return callOf(
      reduceScatterFromOf({"_reduce_scatter_base", "output"}, output,
                          {"_reduce_scatter_base", "input"}, input, options),
      {OpType::_REDUCE_SCATTER_BASE, "ft:_reduce_scatter_base", shown({input}), {{output}}});
}

PreparedCall TensorAdapter::reduceScatterIntoCoalesced(
    const Tensors& outputs, const Tensors& inputs,
    const c10d::ReduceScatterOptions& options) const {
  const Argument out{"reduce_scatter_tensor_coalesced", "outputs"};
  const Argument in{"reduce_scatter_tensor_coalesced", "inputs"};
  TORCH_CHECK_VALUE(!inputs.empty(), in.text(), ": expected at least one tensor, found none");
  checkCount(out, outputs.size(), inputs.size());
  std::vector<Prepared> prepared;
  prepared.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    prepared.push_back(reduceScatterFromOf(out.at(i), outputs[i], in.at(i), inputs[i], options));
  }
  return callOf(std::move(prepared),
                {OpType::COALESCED, "ft:_reduce_scatter_base", shown(inputs), {outputs}});
}

}  // namespace torchft_ext
