// c10d's operations: each is made of its arguments, and issued.
#include "c10d/group/ft_backend.h"
#include "c10d/group/monitored_barrier.h"
#include "c10d/work/comm_error.h"

namespace torchft_ext {
namespace {

void markWaited(PreparedCall& call) {
  for (Prepared& one : call.operations) one.operation.waited = true;
}

}  // namespace

// Not asynchronous: torch's caller waits for it next. It is done here, where this thread does not
// hold the interpreter's lock; the Work tells how it ended.
FtBackend::WorkPtr FtBackend::submit(PreparedCall call, bool asynchronous) {
  if (asynchronous || issuer_.collecting()) return issuer_.submit(std::move(call));
  markWaited(call);
  return completed(issuer_.submit(std::move(call)));
}

FtBackend::WorkPtr FtBackend::completed(WorkPtr work) {
  if (auto* ours = dynamic_cast<FtWork*>(work.get())) ours->complete();
  return work;
}

FtBackend::WorkPtr FtBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return submit(adapter().broadcast(tensors, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return submit(adapter().allreduce(tensors, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& options) {
  return submit(adapter().allreduceCoalesced(tensors, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return submit(adapter().reduce(tensors, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  return submit(adapter().allgather(outputs, inputs, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& options) {
  return submit(adapter().allgatherBase(output, input, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  return submit(adapter().allgatherCoalesced(outputs, inputs, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return submit(adapter().allgatherIntoCoalesced(outputs, inputs, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::gather(TensorLists& outputs, Tensors& inputs,
                                     const c10d::GatherOptions& options) {
  return submit(adapter().gather(outputs, inputs, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                      const c10d::ScatterOptions& options) {
  return submit(adapter().scatter(outputs, inputs, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                             const c10d::ReduceScatterOptions& options) {
  return submit(adapter().reduceScatter(outputs, inputs, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  return submit(adapter().reduceScatterBase(output, input, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return submit(adapter().reduceScatterIntoCoalesced(outputs, inputs, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                            std::vector<int64_t>& output_splits,
                                            std::vector<int64_t>& input_splits,
                                            const c10d::AllToAllOptions& options) {
  return submit(adapter().alltoallBase(output, input, output_splits, input_splits, options),
                options.asyncOp);
}

FtBackend::WorkPtr FtBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllToAllOptions& options) {
  return submit(adapter().alltoall(outputs, inputs, options), options.asyncOp);
}

FtBackend::WorkPtr FtBackend::send(Tensors& tensors, int destination, int tag) {
  return submit(adapter().send(tensors, destination, tag));
}

FtBackend::WorkPtr FtBackend::recv(Tensors& tensors, int source, int tag) {
  return submit(adapter().recv(tensors, source, tag));
}

FtBackend::WorkPtr FtBackend::recvAnysource(Tensors& tensors, int tag) {
  return submit(adapter().recv(tensors, std::nullopt, tag));
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
FtBackend::WorkPtr FtBackend::gather_single(at::Tensor& output, at::Tensor& input,
                                            const c10d::GatherOptions& options) {
  return submit(adapter().gatherSingle(output, input, options), options.asyncOp);
}
#endif

FtBackend::WorkPtr FtBackend::barrier(const c10d::BarrierOptions& options) {
  PreparedCall call = adapter().barrier(options);
  if (options.asyncOp || issuer_.collecting())
    return issuer_.submitBarrier(std::move(call), options.device_ids);
  markWaited(call);
  return completed(issuer_.submitBarrier(std::move(call), options.device_ids));
}

void FtBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const RankInGeneration place = enter();
  const bool unset = options.timeout == c10d::kUnsetTimeout;
  TORCH_CHECK_VALUE(unset || options.timeout.count() >= 0,
                    "monitored_barrier: timeout: expected at least 0, found ",
                    options.timeout.count(), " ms");
  const Duration limit = unset ? group_->timeout() : durationOf(options.timeout);
  const FailurePtr failure =
      await({*group_, place.generation, place.rank, place.size, limit, wait_all_ranks});
  if (failure) throwFailure(failure);
}

void FtBackend::compareLayouts(BucketTag tag) {
  PreparedCall call = adapter().barrier({});
  call.operations.front().bucket = tag;
  submit(std::move(call))->wait();
}

void FtBackend::startCoalescing() {
  guard_.check("this process group");
  issuer_.startBlock();
}

FtBackend::WorkPtr FtBackend::endCoalescing() {
  guard_.check("this process group");
  return issuer_.endBlock();
}

}  // namespace torchft_ext
