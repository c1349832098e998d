// The collectives of the backend that reduce or gather. Each checks, lays out buffers, issues.
#include <utility>

#include "c10d/ft_backend.h"
#include "c10d/sparse_allreduce.h"
#include "comm/callback_path.h"

namespace torchft_ext {
namespace {

using c10d::OpType;

std::optional<std::vector<at::Tensor>> profiled(const std::vector<at::Tensor>& tensors) {
  return tensors;
}

}  // namespace

FtBackend::WorkPtr FtBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const Place place = enter();
  checkOutputs({"broadcast", "tensors"}, tensors, 1);
  checkRank({"broadcast", "root rank"}, options.rootRank, place.size);
  TORCH_CHECK_VALUE(options.rootTensor == 0, "broadcast: root tensor: expected 0, found ",
                    options.rootTensor);
  Prepared prepared = prepare(place, OpKind::kBroadcast, options.timeout, options.asyncOp);
  const bool root = place.rank == options.rootRank;
  const at::Tensor tensor =
      prepared.writableFor(tensors[0], root ? Prepared::Use::kRead : Prepared::Use::kWritten);
  prepared.operation.dtype = dtypeOfData(tensor);
  prepared.operation.root = static_cast<int>(options.rootRank);
  prepared.operation.outputs = {writable(tensor)};
  return submit(std::move(prepared),
                {OpType::BROADCAST, "ft:broadcast", profiled(tensors), {tensors}});
}

Prepared FtBackend::prepareAllreduce(const Argument& argument, const at::Tensor& tensor,
                                     const c10d::AllreduceOptions& options) const {
  if (tensor.defined() && tensor.layout() == at::kSparse)
    return prepareSparseAllreduce(argument, tensor, options);
  checkOutput(argument, tensor);
  Prepared prepared = prepare(enter(), OpKind::kAllreduce, options.timeout, options.asyncOp);
  if (const auto tag = bucket_layouts_.of(tensor)) markAs(prepared, *tag);
  setReduction(prepared, argument, tensor, options.reduceOp);
  prepared.operation.outputs = {writable(prepared.writableFor(tensor, Prepared::Use::kBoth))};
  return prepared;
}

Prepared FtBackend::prepareSparseAllreduce(const Argument& argument, const at::Tensor& tensor,
                                           const c10d::AllreduceOptions& options) const {
  checkSparse(argument, tensor, options.reduceOp);
  // It takes several exchanges, for which a place in the threads' order is needed.
  TORCH_CHECK_VALUE(!CallbackScope::present(), argument.text(),
                    ": expected a dense tensor in a callback of a future, found a sparse one: sum "
                    "it on the thread that waits for the future");
  const DType dtype = reductionOf(argument, tensor, options.reduceOp).dtype;
  const Place place = enter();
  Prepared prepared = prepare(place, OpKind::kSparseAllreduce, options.timeout, options.asyncOp);
  const auto exchanges =
      std::make_shared<SparseAllreduce>(tensor, dtype, place.rank, place.size, letGoElsewhere);
  exchanges->layOut(prepared.operation);
  prepared.operation.dtype = dtype;
  prepared.operation.exchanges = exchanges;
  prepared.given = exchanges->values();
  prepared.tensors = {tensor};
  return prepared;
}

FtBackend::WorkPtr FtBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const Argument argument{"allreduce", "tensors"};
  checkCount(argument, tensors.size(), 1);
  if (tensors[0].defined() && tensors[0].layout() == at::kSparse) {
    return submit(
        prepareSparseAllreduce(argument.at(0), tensors[0], options),
        {OpType::_ALLREDUCE_SPARSE, "ft:sparse_all_reduce", profiled(tensors), {tensors}});
  }
  return submit(prepareAllreduce(argument.at(0), tensors[0], options),
                {OpType::ALLREDUCE, "ft:all_reduce", profiled(tensors), {tensors}});
}

FtBackend::WorkPtr FtBackend::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& options) {
  const Argument argument{"allreduce_coalesced", "tensors"};
  TORCH_CHECK_VALUE(!tensors.empty(), argument.text(),
                    ": expected at least one tensor, found none");
  std::vector<Prepared> prepared;
  prepared.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    prepared.push_back(prepareAllreduce(argument.at(i), tensors[i], options));
  }
  return submitAll(
      std::move(prepared),
      {OpType::ALLREDUCE_COALESCED, "ft:all_reduce_coalesced", profiled(tensors), {tensors}});
}

FtBackend::WorkPtr FtBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const Place place = enter();
  const Argument argument{"reduce", "tensors"};
  checkOutputs(argument, tensors, 1);
  checkRank({"reduce", "root rank"}, options.rootRank, place.size);
  TORCH_CHECK_VALUE(options.rootTensor == 0, "reduce: root tensor: expected 0, found ",
                    options.rootTensor);
  Prepared prepared = prepare(place, OpKind::kReduce, options.timeout, options.asyncOp);
  setReduction(prepared, argument.at(0), tensors[0], options.reduceOp);
  prepared.operation.root = static_cast<int>(options.rootRank);
  const bool root = place.rank == options.rootRank;
  const at::Tensor tensor =
      prepared.writableFor(tensors[0], root ? Prepared::Use::kBoth : Prepared::Use::kRead);
  prepared.operation.inputs = {readable(tensor)};
  if (root) prepared.operation.outputs = {writable(tensor)};
  return submit(std::move(prepared), {OpType::REDUCE, "ft:reduce", profiled(tensors), {tensors}});
}

Prepared FtBackend::prepareAllgather(const Argument& outs, const Tensors& outputs,
                                     const Argument& in, const at::Tensor& input,
                                     const c10d::AllgatherOptions& options) const {
  const Place place = enter();
  checkOutputs(outs, outputs, static_cast<size_t>(place.size));
  const at::Tensor given = asInput(in, input);
  const at::Tensor& mine = outputs[static_cast<size_t>(place.rank)];
  checkSameDtype(outs.at(0), outputs[0], in, given);
  checkNumel(outs.at(static_cast<size_t>(place.rank)), mine, given.numel(),
             "as this rank's input has");
  Prepared prepared = prepare(place, OpKind::kAllgather, options.timeout, options.asyncOp);
  const Tensors written = prepared.writableFor(outputs);
  const at::Tensor own = prepared.readableFor(
      given, written, written[static_cast<size_t>(place.rank)].const_data_ptr());
  prepared.operation.dtype = dtypeOfData(own);
  prepared.operation.inputs = {readable(own)};
  for (const at::Tensor& output : written) prepared.operation.outputs.push_back(writable(output));
  return prepared;
}

FtBackend::WorkPtr FtBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  const Argument out{"allgather", "outputs"};
  const Argument in{"allgather", "inputs"};
  checkCount(in, inputs.size(), 1);
  checkCount(out, outputs.size(), 1);
  return submit(prepareAllgather(out.at(0), outputs[0], in.at(0), inputs[0], options),
                {OpType::ALLGATHER, "ft:all_gather", profiled(inputs), outputs});
}

FtBackend::WorkPtr FtBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  // c10d has one list per rank here: outputs[rank][i] is what `rank` gave as inputs[i].
  const Argument out{"allgather_coalesced", "outputs"};
  const Argument in{"allgather_coalesced", "inputs"};
  const Place place = enter();
  TORCH_CHECK_VALUE(!inputs.empty(), in.text(), ": expected at least one tensor, found none");
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(place.size), out.text(), ": expected ",
                    place.size, " lists (one for each rank), found ", outputs.size());
  for (size_t rank = 0; rank < outputs.size(); ++rank)
    checkCount(out.at(rank), outputs[rank].size(), inputs.size());
  std::vector<Prepared> prepared;
  prepared.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors from_ranks;
    for (const Tensors& of_rank : outputs) from_ranks.push_back(of_rank[i]);
    prepared.push_back(prepareAllgather(out, from_ranks, in.at(i), inputs[i], options));
  }
  return submitAll(std::move(prepared),
                   {OpType::ALLGATHER_COALESCED, "ft:all_gather", profiled(inputs), outputs});
}

Prepared FtBackend::prepareAllgatherInto(const Argument& out, const at::Tensor& output,
                                         const Argument& in, const at::Tensor& input,
                                         const c10d::AllgatherOptions& options) const {
  const Place place = enter();
  checkOutput(out, output);
  const at::Tensor given = asInput(in, input);
  checkSameDtype(out, output, in, given);
  checkNumel(out, output, given.numel() * place.size, "world size times the input's");
  Prepared prepared = prepare(place, OpKind::kAllgather, options.timeout, options.asyncOp);
  const at::Tensor written = prepared.writableFor(output, Prepared::Use::kWritten);
  prepared.operation.outputs = cut(writable(written), place.size);
  const at::Tensor own = prepared.readableFor(
      given, {written}, prepared.operation.outputs[static_cast<size_t>(place.rank)].data);
  prepared.operation.dtype = dtypeOfData(own);
  prepared.operation.inputs = {readable(own)};
  prepared.flat = true;
  return prepared;
}

FtBackend::WorkPtr FtBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& options) {
  return submit(prepareAllgatherInto({"_allgather_base", "output"}, output,
                                     {"_allgather_base", "input"}, input, options),
                {OpType::_ALLGATHER_BASE, "ft:_all_gather_base", profiled({input}), {{output}}});
}

FtBackend::WorkPtr FtBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const Argument out{"allgather_into_tensor_coalesced", "outputs"};
  const Argument in{"allgather_into_tensor_coalesced", "inputs"};
  TORCH_CHECK_VALUE(!inputs.empty(), in.text(), ": expected at least one tensor, found none");
  checkCount(out, outputs.size(), inputs.size());
  std::vector<Prepared> prepared;
  prepared.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    prepared.push_back(prepareAllgatherInto(out.at(i), outputs[i], in.at(i), inputs[i], options));
  }
  return submitAll(std::move(prepared),
                   {OpType::COALESCED, "ft:_all_gather_base", profiled(inputs), {outputs}});
}

FtBackend::WorkPtr FtBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                             const c10d::ReduceScatterOptions& options) {
  const Place place = enter();
  const Argument out{"reduce_scatter", "outputs"};
  const Argument in{"reduce_scatter", "inputs"};
  checkOutputs(out, outputs, 1);
  checkCount(in, inputs.size(), 1);
  checkCount(in.at(0), inputs[0].size(), static_cast<size_t>(place.size));
  Prepared prepared = prepare(place, OpKind::kReduceScatter, options.timeout, options.asyncOp);
  setReduction(prepared, out.at(0), outputs[0], options.reduceOp);
  const Tensors written = prepared.writableFor(outputs);
  prepared.operation.outputs = {writable(written[0])};
  for (size_t i = 0; i < inputs[0].size(); ++i) {
    const at::Tensor given = asInput(in.at(0).at(i), inputs[0][i]);
    checkSameDtype(in.at(0).at(i), given, out.at(0), outputs[0]);
    // Parts may differ in size, the same on every rank.
    const bool own = i == static_cast<size_t>(place.rank);
    if (own) checkNumel(in.at(0).at(i), given, outputs[0].numel(), "as the output has");
    const void* in_place = own ? written[0].const_data_ptr() : nullptr;
    prepared.operation.inputs.push_back(readable(prepared.readableFor(given, written, in_place)));
  }
  return submit(std::move(prepared),
                {OpType::REDUCE_SCATTER, "ft:reduce_scatter", profiled(inputs[0]), {outputs}});
}

Prepared FtBackend::prepareReduceScatterFrom(const Argument& out, const at::Tensor& output,
                                             const Argument& in, const at::Tensor& input,
                                             const c10d::ReduceScatterOptions& options) const {
  const Place place = enter();
  checkOutput(out, output);
  const at::Tensor given = asInput(in, input);
  checkSameDtype(in, given, out, output);
  checkNumel(in, given, output.numel() * place.size, "world size times the output's");
  Prepared prepared = prepare(place, OpKind::kReduceScatter, options.timeout, options.asyncOp);
  const at::Tensor written = prepared.writableFor(output, Prepared::Use::kWritten);
  const size_t offset = static_cast<size_t>(place.rank) * output.nbytes();
  const bool in_place =
      static_cast<const uint8_t*>(given.const_data_ptr()) + offset == written.const_data_ptr();
  const at::Tensor whole =
      prepared.readableFor(given, {written}, in_place ? given.const_data_ptr() : nullptr);
  setReduction(prepared, out, output, options.reduceOp);
  prepared.operation.inputs = cut(readable(whole), place.size);
  prepared.operation.outputs = {writable(written)};
  prepared.flat = true;
  return prepared;
}

FtBackend::WorkPtr FtBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  return submit(
      prepareReduceScatterFrom({"_reduce_scatter_base", "output"}, output,
                               {"_reduce_scatter_base", "input"}, input, options),
      {OpType::_REDUCE_SCATTER_BASE, "ft:_reduce_scatter_base", profiled({input}), {{output}}});
}

FtBackend::WorkPtr FtBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const Argument out{"reduce_scatter_tensor_coalesced", "outputs"};
  const Argument in{"reduce_scatter_tensor_coalesced", "inputs"};
  TORCH_CHECK_VALUE(!inputs.empty(), in.text(), ": expected at least one tensor, found none");
  checkCount(out, outputs.size(), inputs.size());
  std::vector<Prepared> prepared;
  prepared.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    prepared.push_back(
        prepareReduceScatterFrom(out.at(i), outputs[i], in.at(i), inputs[i], options));
  }
  return submitAll(std::move(prepared),
                   {OpType::COALESCED, "ft:_reduce_scatter_base", profiled(inputs), {outputs}});
}

}  // namespace torchft_ext
