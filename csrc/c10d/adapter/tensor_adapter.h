// From the arguments of c10d's collectives to operations: checks them completely, lays out their
// buffers, and issues nothing. Refusals are those of arguments.h.
//
// A value, made for each call: it knows the generation that it lays out for, and no group. Any
// thread. It never blocks and never takes the GIL.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "c10d/adapter/arguments.h"
#include "c10d/adapter/prepared.h"
#include "device/device_platform.h"

namespace torchft_ext {

// Where this process stands in one generation, as read at one moment.
struct RankInGeneration {
  int64_t generation = 0;
  int rank = 0;
  int size = 1;
};

class TensorAdapter {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  // platform: of device tensors, to outlive this object; null: none are served.
  TensorAdapter(const RankInGeneration& place, const DevicePlatform* platform)
      : place_(place), platform_(platform) {}

  // As c10d's methods of the same names. An operation whose options name no timeout has none yet:
  // zero.
  PreparedCall broadcast(const Tensors& tensors, const c10d::BroadcastOptions& options) const;
  // Sparse tensors too, of the CPU.
  PreparedCall allreduce(const Tensors& tensors, const c10d::AllreduceOptions& options) const;
  PreparedCall allreduceCoalesced(const Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& options) const;
  PreparedCall reduce(const Tensors& tensors, const c10d::ReduceOptions& options) const;
  PreparedCall allgather(const TensorLists& outputs, const Tensors& inputs,
                         const c10d::AllgatherOptions& options) const;
  PreparedCall allgatherCoalesced(const TensorLists& outputs, const Tensors& inputs,
                                  const c10d::AllgatherOptions& options) const;
  PreparedCall allgatherBase(const at::Tensor& output, const at::Tensor& input,
                             const c10d::AllgatherOptions& options) const;
  PreparedCall allgatherIntoCoalesced(const Tensors& outputs, const Tensors& inputs,
                                      const c10d::AllgatherOptions& options) const;
  PreparedCall reduceScatter(const Tensors& outputs, const TensorLists& inputs,
                             const c10d::ReduceScatterOptions& options) const;
  PreparedCall reduceScatterBase(const at::Tensor& output, const at::Tensor& input,
                                 const c10d::ReduceScatterOptions& options) const;
  PreparedCall reduceScatterIntoCoalesced(const Tensors& outputs, const Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) const;
  PreparedCall gather(const TensorLists& outputs, const Tensors& inputs,
                      const c10d::GatherOptions& options) const;
  PreparedCall gatherSingle(const at::Tensor& output, const at::Tensor& input,
                            const c10d::GatherOptions& options) const;
  PreparedCall scatter(const Tensors& outputs, const TensorLists& inputs,
                       const c10d::ScatterOptions& options) const;
  PreparedCall alltoallBase(const at::Tensor& output, const at::Tensor& input,
                            const std::vector<int64_t>& output_splits,
                            const std::vector<int64_t>& input_splits,
                            const c10d::AllToAllOptions& options) const;
  PreparedCall alltoall(const Tensors& outputs, const Tensors& inputs,
                        const c10d::AllToAllOptions& options) const;
  PreparedCall send(const Tensors& tensors, int destination, int tag) const;
  // source: nullopt for any.
  PreparedCall recv(const Tensors& tensors, std::optional<int> source, int tag) const;
  PreparedCall barrier(const c10d::BarrierOptions& options) const;

 private:
  Prepared allreduceOf(const Argument& argument, const at::Tensor& tensor,
                       const c10d::AllreduceOptions& options) const;
  Prepared sparseAllreduceOf(const Argument& argument, const at::Tensor& tensor,
                             const c10d::AllreduceOptions& options) const;
  Prepared allgatherOf(const Argument& outs, const Tensors& outputs, const Argument& in,
                       const at::Tensor& input, const c10d::AllgatherOptions& options) const;
  Prepared allgatherIntoOf(const Argument& out, const at::Tensor& output, const Argument& in,
                           const at::Tensor& input, const c10d::AllgatherOptions& options) const;
  Prepared reduceScatterFromOf(const Argument& out, const at::Tensor& output, const Argument& in,
                               const at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) const;
  Prepared prepare(OpKind kind, std::chrono::milliseconds timeout, bool async) const;
  void setReduction(Prepared& prepared, const Argument& argument, const at::Tensor& tensor,
                    const c10d::ReduceOp& reduce_op) const;
  static std::optional<Tensors> shown(const Tensors& tensors);  // to the profiler, as inputs
  static PreparedCall callOf(Prepared prepared, Described described);
  static PreparedCall callOf(std::vector<Prepared> prepared, Described described);

  RankInGeneration place_;
  const DevicePlatform* platform_;
};

}  // namespace torchft_ext
