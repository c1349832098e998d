// c10d's operations: each is made of its arguments, and issued.
#include "c10d/group/ft_backend.h"
#include "c10d/group/monitored_barrier.h"
#include "c10d/work/comm_error.h"

namespace torchft_ext {

FtBackend::WorkPtr FtBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return submit(adapter().broadcast(tensors, options));
}

FtBackend::WorkPtr FtBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return submit(adapter().allreduce(tensors, options));
}

FtBackend::WorkPtr FtBackend::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& options) {
  return submit(adapter().allreduceCoalesced(tensors, options));
}

FtBackend::WorkPtr FtBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return submit(adapter().reduce(tensors, options));
}

FtBackend::WorkPtr FtBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  return submit(adapter().allgather(outputs, inputs, options));
}

FtBackend::WorkPtr FtBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& options) {
  return submit(adapter().allgatherBase(output, input, options));
}

FtBackend::WorkPtr FtBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  return submit(adapter().allgatherCoalesced(outputs, inputs, options));
}

FtBackend::WorkPtr FtBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return submit(adapter().allgatherIntoCoalesced(outputs, inputs, options));
}

FtBackend::WorkPtr FtBackend::gather(TensorLists& outputs, Tensors& inputs,
                                     const c10d::GatherOptions& options) {
  return submit(adapter().gather(outputs, inputs, options));
}

FtBackend::WorkPtr FtBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                      const c10d::ScatterOptions& options) {
  return submit(adapter().scatter(outputs, inputs, options));
}

FtBackend::WorkPtr FtBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                             const c10d::ReduceScatterOptions& options) {
  return submit(adapter().reduceScatter(outputs, inputs, options));
}

FtBackend::WorkPtr FtBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  return submit(adapter().reduceScatterBase(output, input, options));
}

FtBackend::WorkPtr FtBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return submit(adapter().reduceScatterIntoCoalesced(outputs, inputs, options));
}

FtBackend::WorkPtr FtBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                            std::vector<int64_t>& output_splits,
                                            std::vector<int64_t>& input_splits,
                                            const c10d::AllToAllOptions& options) {
  return submit(adapter().alltoallBase(output, input, output_splits, input_splits, options));
}

FtBackend::WorkPtr FtBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllToAllOptions& options) {
  return submit(adapter().alltoall(outputs, inputs, options));
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
  return submit(adapter().gatherSingle(output, input, options));
}
#endif

FtBackend::WorkPtr FtBackend::barrier(const c10d::BarrierOptions& options) {
  return issuer_.submitBarrier(adapter().barrier(options), options.device_ids);
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
