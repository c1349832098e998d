// The operations of the backend that move data between single ranks, and the barrier.
#include <utility>

#include "c10d/comm_error.h"
#include "c10d/ft_backend.h"
#include "c10d/monitored_barrier.h"

namespace torchft_ext {
namespace {

using c10d::OpType;

std::optional<std::vector<at::Tensor>> profiled(const std::vector<at::Tensor>& tensors) {
  return tensors;
}

uint64_t checkedTag(const char* op, int tag) {
  TORCH_CHECK_VALUE(tag >= 0, op, ": tag: expected at least 0, found ", tag);
  return static_cast<uint64_t>(tag);
}

}  // namespace

FtBackend::WorkPtr FtBackend::gather(TensorLists& outputs, Tensors& inputs,
                                     const c10d::GatherOptions& options) {
  const Place place = enter();
  const Argument out{"gather", "outputs"};
  const Argument in{"gather", "inputs"};
  checkRank({"gather", "root rank"}, options.rootRank, place.size);
  checkCount(in, inputs.size(), 1);
  const at::Tensor given = asInput(in.at(0), inputs[0]);
  Prepared prepared = prepare(place, OpKind::kGather, options.timeout, options.asyncOp);
  prepared.operation.dtype = dtypeOfData(given);
  prepared.operation.root = static_cast<int>(options.rootRank);
  Tensors written;
  if (place.rank == options.rootRank) {
    checkCount(out, outputs.size(), 1);
    checkOutputs(out.at(0), outputs[0], static_cast<size_t>(place.size));
    checkSameDtype(out.at(0).at(0), outputs[0][0], in.at(0), given);
    written = prepared.writableFor(outputs[0]);
    for (size_t i = 0; i < written.size(); ++i) {
      checkNumel(out.at(0).at(i), written[i], given.numel(), "as the input has");
      prepared.operation.outputs.push_back(writable(written[i]));
    }
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), out.text(),
                      ": expected an empty list on ranks other than the root, found ",
                      outputs.size(), " lists");
  }
  prepared.operation.inputs = {readable(prepared.readableFor(given, written))};
  return submit(std::move(prepared), {OpType::GATHER, "ft:gather", profiled(inputs), outputs});
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
FtBackend::WorkPtr FtBackend::gather_single(at::Tensor& output, at::Tensor& input,
                                            const c10d::GatherOptions& options) {
  const Place place = enter();
  const Argument out{"gather_single", "output"};
  const Argument in{"gather_single", "input"};
  checkRank({"gather_single", "root rank"}, options.rootRank, place.size);
  const at::Tensor given = asInput(in, input);
  Prepared prepared = prepare(place, OpKind::kGather, options.timeout, options.asyncOp);
  prepared.operation.dtype = dtypeOfData(given);
  prepared.operation.root = static_cast<int>(options.rootRank);
  prepared.flat = true;
  Tensors written;
  if (place.rank == options.rootRank) {
    checkOutput(out, output);
    checkSameDtype(out, output, in, given);
    checkNumel(out, output, given.numel() * place.size, "world size times the input's");
    written = {prepared.writableFor(output, Prepared::Use::kWritten)};
    prepared.operation.outputs = cut(writable(written[0]), place.size);
  }
  prepared.operation.inputs = {readable(prepared.readableFor(given, written))};
  return submit(std::move(prepared), {OpType::GATHER, "ft:gather", profiled({input}), {{output}}});
}
#endif

FtBackend::WorkPtr FtBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                      const c10d::ScatterOptions& options) {
  const Place place = enter();
  const Argument out{"scatter", "outputs"};
  const Argument in{"scatter", "inputs"};
  checkRank({"scatter", "root rank"}, options.rootRank, place.size);
  checkOutputs(out, outputs, 1);
  Prepared prepared = prepare(place, OpKind::kScatter, options.timeout, options.asyncOp);
  prepared.operation.dtype = dtypeOfData(outputs[0]);
  prepared.operation.root = static_cast<int>(options.rootRank);
  const Tensors written = prepared.writableFor(outputs);
  prepared.operation.outputs = {writable(written[0])};
  if (place.rank == options.rootRank) {
    checkCount(in, inputs.size(), 1);
    checkCount(in.at(0), inputs[0].size(), static_cast<size_t>(place.size));
    for (size_t i = 0; i < inputs[0].size(); ++i) {
      const at::Tensor given = asInput(in.at(0).at(i), inputs[0][i]);
      checkSameDtype(in.at(0).at(i), given, out.at(0), outputs[0]);
      checkNumel(in.at(0).at(i), given, outputs[0].numel(), "as the output has");
      prepared.operation.inputs.push_back(readable(prepared.readableFor(given, written)));
    }
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), in.text(),
                      ": expected an empty list on ranks other than the root, found ",
                      inputs.size(), " lists");
  }
  const Tensors shown = inputs.empty() ? Tensors() : inputs[0];
  return submit(std::move(prepared), {OpType::SCATTER, "ft:scatter", profiled(shown), {outputs}});
}

FtBackend::WorkPtr FtBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                            std::vector<int64_t>& output_splits,
                                            std::vector<int64_t>& input_splits,
                                            const c10d::AllToAllOptions& options) {
  const Place place = enter();
  const Argument out{"alltoall_base", "output"};
  const Argument in{"alltoall_base", "input"};
  checkOutput(out, output);
  Prepared prepared = prepare(place, OpKind::kAlltoall, options.timeout, options.asyncOp);
  const at::Tensor written = prepared.writableFor(output, Prepared::Use::kWritten);
  const at::Tensor whole = prepared.readableFor(asInput(in, input), {written});
  checkSameDtype(out, output, in, whole);
  prepared.operation.dtype = dtypeOfData(output);
  prepared.operation.inputs = splitRows(in, whole, readable(whole), input_splits, place.size);
  prepared.operation.outputs =
      splitRows(out, written, writable(written), output_splits, place.size);
  const auto self = static_cast<size_t>(place.rank);
  const size_t sent = prepared.operation.inputs[self].bytes;
  TORCH_CHECK_VALUE(sent == prepared.operation.outputs[self].bytes, out.text(),
                    ": expected room for ", sent,
                    " bytes from this rank itself, as its input split has, found ",
                    prepared.operation.outputs[self].bytes);
  return submit(std::move(prepared),
                {OpType::ALLTOALL_BASE, "ft:all_to_all", profiled({input}), {{output}}});
}

FtBackend::WorkPtr FtBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllToAllOptions& options) {
  const Place place = enter();
  const Argument out{"alltoall", "outputs"};
  const Argument in{"alltoall", "inputs"};
  const auto size = static_cast<size_t>(place.size);
  checkOutputs(out, outputs, size);
  checkCount(in, inputs.size(), size);
  Prepared prepared = prepare(place, OpKind::kAlltoall, options.timeout, options.asyncOp);
  prepared.operation.dtype = dtypeOfData(outputs[0]);
  const Tensors written = prepared.writableFor(outputs);
  for (size_t i = 0; i < size; ++i) {
    const at::Tensor given = asInput(in.at(i), inputs[i]);
    checkSameDtype(in.at(i), given, out.at(0), outputs[0]);
    prepared.operation.inputs.push_back(readable(prepared.readableFor(given, written)));
    prepared.operation.outputs.push_back(writable(written[i]));
  }
  const auto self = static_cast<size_t>(place.rank);
  checkNumel(out.at(self), outputs[self], inputs[self].numel(),
             "as this rank's input for itself has");
  return submit(std::move(prepared),
                {OpType::ALLTOALL, "ft:all_to_all", profiled(inputs), {outputs}});
}

FtBackend::WorkPtr FtBackend::send(Tensors& tensors, int destination, int tag) {
  const Place place = enter();
  const Argument argument{"send", "tensors"};
  checkCount(argument, tensors.size(), 1);
  checkRank({"send", "destination rank"}, destination, place.size);
  TORCH_CHECK_VALUE(destination != place.rank,
                    "send: destination rank: expected another rank, found this one, ", destination);
  const at::Tensor input = asInput(argument.at(0), tensors[0]).contiguous();
  Prepared prepared = prepare(place, OpKind::kSend, c10d::kUnsetTimeout, true);
  prepared.operation.dtype = dtypeOfData(input);
  prepared.operation.peer = destination;
  prepared.operation.tag = checkedTag("send", tag);
  prepared.operation.inputs = {readable(input)};
  prepared.tensors = {tensors[0]};
  if (!input.is_same(tensors[0])) prepared.kept = {input};
  return submit(std::move(prepared), {OpType::SEND, "ft:send", profiled(tensors), {tensors}});
}

FtBackend::WorkPtr FtBackend::recv(Tensors& tensors, int source, int tag) {
  return receive(tensors, source, tag);
}

FtBackend::WorkPtr FtBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, std::nullopt, tag);
}

FtBackend::WorkPtr FtBackend::receive(Tensors& tensors, std::optional<int> source, int tag) {
  const Place place = enter();
  const char* op = source ? "recv" : "recv_anysource";
  checkOutputs({op, "tensors"}, tensors, 1);
  TORCH_CHECK_NOT_IMPLEMENTED(
      source || tensors[0].is_cpu(), op, ": tensors[0]: expected a CPU tensor, found one on ",
      tensors[0].device(), ": NCCL receives from a named rank only; give the source rank");
  if (source) {
    checkRank({op, "source rank"}, *source, place.size);
    TORCH_CHECK_VALUE(*source != place.rank,
                      "recv: source rank: expected another rank, found this one, ", *source);
  }
  Prepared prepared = prepare(place, OpKind::kRecv, c10d::kUnsetTimeout, true);
  prepared.operation.dtype = dtypeOfData(tensors[0]);
  prepared.operation.peer = source.value_or(-1);
  prepared.operation.tag = checkedTag(op, tag);
  prepared.operation.outputs = {
      writable(prepared.writableFor(tensors[0], Prepared::Use::kWritten))};
  const OpType type = source ? OpType::RECV : OpType::RECVANYSOURCE;
  return submit(std::move(prepared),
                {type, source ? "ft:recv" : "ft:recvAnySource", profiled(tensors), {tensors}});
}

FtBackend::WorkPtr FtBackend::barrier(const c10d::BarrierOptions& options) {
  Prepared prepared = prepare(enter(), OpKind::kBarrier, options.timeout, options.asyncOp);
  if (const auto device = devices_.forBarrier(options.device_ids, bound_device_, deviceUsed()))
    placeOn(*device, prepared);
  return submit(std::move(prepared), {OpType::BARRIER, "ft:barrier", std::nullopt, {}});
}

void FtBackend::compareLayouts(BucketTag tag) {
  Prepared prepared = prepare(enter(), OpKind::kBarrier, Milliseconds(0), true);
  markAs(prepared, tag);
  submit(std::move(prepared), {OpType::BARRIER, "ft:barrier", std::nullopt, {}})->wait();
}

void FtBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const Place place = enter();
  const bool unset = options.timeout == c10d::kUnsetTimeout;
  TORCH_CHECK_VALUE(unset || options.timeout.count() >= 0,
                    "monitored_barrier: timeout: expected at least 0, found ",
                    options.timeout.count(), " ms");
  const Duration limit = unset ? group_->timeout() : durationOf(options.timeout);
  const FailurePtr failure =
      await({*group_, place.epoch, place.rank, place.size, limit, wait_all_ranks});
  if (failure) throwFailure(failure);
}

}  // namespace torchft_ext
