// Operations that move data between single ranks, and the barrier.
#include <utility>

#include "c10d/adapter/tensor_adapter.h"

namespace torchft_ext {
namespace {

using c10d::OpType;

uint64_t checkedTag(const char* op, int tag) {
  TORCH_CHECK_VALUE(tag >= 0, op, ": tag: expected at least 0, found ", tag);
  return static_cast<uint64_t>(tag);
}

// Sets the dtype and count that both ends of a message compare. A complex tensor counts as its real
// view, since torch's own functions send that view.
void setItems(Operation& operation, const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  if (tensor.is_cpu() && at::isComplexType(type)) {
    operation.dtype = namedDtype(c10::toRealValueType(type)).value_or(DType::kUint8);
    return;
  }
  operation.dtype = dtypeOfData(tensor);
  if (namedDtype(type) != operation.dtype)
    operation.torch_dtype = static_cast<uint8_t>(static_cast<int>(type) + 1);
}

}  // namespace

PreparedCall TensorAdapter::gather(const TensorLists& outputs, const Tensors& inputs,
                                   const c10d::GatherOptions& options) const {
  const Argument out{"gather", "outputs"};
  const Argument in{"gather", "inputs"};
  checkRank({"gather", "root rank"}, options.rootRank, place_.size);
  checkCount(in, inputs.size(), 1);
  const at::Tensor given = asInput(in.at(0), inputs[0]);
  Prepared prepared = prepare(OpKind::kGather, options.timeout, options.asyncOp);
  prepared.operation.dtype = dtypeOfData(given);
  prepared.operation.root = static_cast<int>(options.rootRank);
  Tensors written;
  if (place_.rank == options.rootRank) {
    checkCount(out, outputs.size(), 1);
    checkOutputs(out.at(0), outputs[0], static_cast<size_t>(place_.size));
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
  return callOf(std::move(prepared), {OpType::GATHER, "ft:gather", shown(inputs), outputs});
}

PreparedCall TensorAdapter::gatherSingle(const at::Tensor& output, const at::Tensor& input,
                                         const c10d::GatherOptions& options) const {
  const Argument out{"gather_single", "output"};
  const Argument in{"gather_single", "input"};
  checkRank({"gather_single", "root rank"}, options.rootRank, place_.size);
  const at::Tensor given = asInput(in, input);
  Prepared prepared = prepare(OpKind::kGather, options.timeout, options.asyncOp);
  prepared.operation.dtype = dtypeOfData(given);
  prepared.operation.root = static_cast<int>(options.rootRank);
  prepared.flat = true;
  Tensors written;
  if (place_.rank == options.rootRank) {
    checkOutput(out, output);
    checkSameDtype(out, output, in, given);
    checkNumel(out, output, given.numel() * place_.size, "world size times the input's");
    written = {prepared.writableFor(output, Prepared::Use::kWritten)};
    prepared.operation.outputs = cut(writable(written[0]), place_.size);
  }
  prepared.operation.inputs = {readable(prepared.readableFor(given, written))};
  return callOf(std::move(prepared), {OpType::GATHER, "ft:gather", shown({input}), {{output}}});
}

PreparedCall TensorAdapter::scatter(const Tensors& outputs, const TensorLists& inputs,
                                    const c10d::ScatterOptions& options) const {
  const Argument out{"scatter", "outputs"};
  const Argument in{"scatter", "inputs"};
  checkRank({"scatter", "root rank"}, options.rootRank, place_.size);
  checkOutputs(out, outputs, 1);
  Prepared prepared = prepare(OpKind::kScatter, options.timeout, options.asyncOp);
  prepared.operation.dtype = dtypeOfData(outputs[0]);
  prepared.operation.root = static_cast<int>(options.rootRank);
  const Tensors written = prepared.writableFor(outputs);
  prepared.operation.outputs = {writable(written[0])};
  if (place_.rank == options.rootRank) {
    checkCount(in, inputs.size(), 1);
    checkCount(in.at(0), inputs[0].size(), static_cast<size_t>(place_.size));
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
  const Tensors given = inputs.empty() ? Tensors() : inputs[0];
  return callOf(std::move(prepared), {OpType::SCATTER, "ft:scatter", shown(given), {outputs}});
}

PreparedCall TensorAdapter::alltoallBase(const at::Tensor& output, const at::Tensor& input,
                                         const std::vector<int64_t>& output_splits,
                                         const std::vector<int64_t>& input_splits,
                                         const c10d::AllToAllOptions& options) const {
  const Argument out{"alltoall_base", "output"};
  const Argument in{"alltoall_base", "input"};
  checkOutput(out, output);
  Prepared prepared = prepare(OpKind::kAlltoall, options.timeout, options.asyncOp);
  const at::Tensor written = prepared.writableFor(output, Prepared::Use::kWritten);
  const at::Tensor whole = prepared.readableFor(asInput(in, input), {written});
  checkSameDtype(out, output, in, whole);
  prepared.operation.dtype = dtypeOfData(output);
  prepared.operation.inputs = splitRows(in, whole, readable(whole), input_splits, place_.size);
  prepared.operation.outputs =
      splitRows(out, written, writable(written), output_splits, place_.size);
  const auto self = static_cast<size_t>(place_.rank);
  const size_t sent = prepared.operation.inputs[self].bytes;
  TORCH_CHECK_VALUE(sent == prepared.operation.outputs[self].bytes, out.text(),
                    ": expected room for ", sent,
                    " bytes from this rank itself, as its input split has, found ",
                    prepared.operation.outputs[self].bytes);
  return callOf(std::move(prepared),
                {OpType::ALLTOALL_BASE, "ft:all_to_all", shown({input}), {{output}}});
}

PreparedCall TensorAdapter::alltoall(const Tensors& outputs, const Tensors& inputs,
                                     const c10d::AllToAllOptions& options) const {
  const Argument out{"alltoall", "outputs"};
  const Argument in{"alltoall", "inputs"};
  const auto size = static_cast<size_t>(place_.size);
  checkOutputs(out, outputs, size);
  checkCount(in, inputs.size(), size);
  Prepared prepared = prepare(OpKind::kAlltoall, options.timeout, options.asyncOp);
  prepared.operation.dtype = dtypeOfData(outputs[0]);
  const Tensors written = prepared.writableFor(outputs);
  for (size_t i = 0; i < size; ++i) {
    const at::Tensor given = asInput(in.at(i), inputs[i]);
    checkSameDtype(in.at(i), given, out.at(0), outputs[0]);
    prepared.operation.inputs.push_back(readable(prepared.readableFor(given, written)));
    prepared.operation.outputs.push_back(writable(written[i]));
  }
  const auto self = static_cast<size_t>(place_.rank);
  checkNumel(out.at(self), outputs[self], inputs[self].numel(),
             "as this rank's input for itself has");
  return callOf(std::move(prepared), {OpType::ALLTOALL, "ft:all_to_all", shown(inputs), {outputs}});
}

PreparedCall TensorAdapter::send(const Tensors& tensors, int destination, int tag) const {
  const Argument argument{"send", "tensors"};
  checkCount(argument, tensors.size(), 1);
  checkRank({"send", "destination rank"}, destination, place_.size);
  TORCH_CHECK_VALUE(destination != place_.rank,
                    "send: destination rank: expected another rank, found this one, ", destination);
  const at::Tensor input = asInput(argument.at(0), tensors[0]).contiguous();
  Prepared prepared = prepare(OpKind::kSend, c10d::kUnsetTimeout, true);
  setItems(prepared.operation, input);
  prepared.operation.peer = destination;
  prepared.operation.tag = checkedTag("send", tag);
  prepared.operation.inputs = {readable(input)};
  prepared.tensors = {tensors[0]};
  if (!input.is_same(tensors[0])) prepared.kept = {input};
  return callOf(std::move(prepared), {OpType::SEND, "ft:send", shown(tensors), {tensors}});
}

PreparedCall TensorAdapter::recv(const Tensors& tensors, std::optional<int> source, int tag) const {
  const char* op = source ? "recv" : "recv_anysource";
  checkOutputs({op, "tensors"}, tensors, 1);
  // Where no device is served, the refusal of all its tensors follows.
  TORCH_CHECK_NOT_IMPLEMENTED(source || tensors[0].is_cpu() || platform_ == nullptr, op,
                              ": tensors[0]: expected a CPU tensor, found one on ",
                              tensors[0].device(), ": ", platform_->library(),
                              " receives from a named rank only; give the source rank");
  if (source) {
    checkRank({op, "source rank"}, *source, place_.size);
    TORCH_CHECK_VALUE(*source != place_.rank,
                      "recv: source rank: expected another rank, found this one, ", *source);
  }
  Prepared prepared = prepare(OpKind::kRecv, c10d::kUnsetTimeout, true);
  setItems(prepared.operation, tensors[0]);
  prepared.operation.peer = source.value_or(-1);
  prepared.operation.tag = checkedTag(op, tag);
  prepared.operation.outputs = {
      writable(prepared.writableFor(tensors[0], Prepared::Use::kWritten))};
  const OpType type = source ? OpType::RECV : OpType::RECVANYSOURCE;
  return callOf(std::move(prepared),
                {type, source ? "ft:recv" : "ft:recvAnySource", shown(tensors), {tensors}});
}

PreparedCall TensorAdapter::barrier(const c10d::BarrierOptions& options) const {
  return callOf(prepare(OpKind::kBarrier, options.timeout, options.asyncOp),
                {OpType::BARRIER, "ft:barrier", std::nullopt, {}});
}

}  // namespace torchft_ext
