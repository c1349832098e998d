#include "nccl/nccl_calls.h"

#include <algorithm>
#include <optional>

namespace torchft_ext {
namespace {

bool reduces(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}

// The dtype in which NCCL reduces it. nullopt: none.
std::optional<NcclType> reducedAs(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return NcclType::kFloat32;
    case DType::kDouble:
      return NcclType::kFloat64;
    case DType::kHalf:
      return NcclType::kFloat16;
    case DType::kBFloat16:
      return NcclType::kBFloat16;
    case DType::kInt8:
      return NcclType::kInt8;
    case DType::kInt32:
      return NcclType::kInt32;
    case DType::kInt64:
      return NcclType::kInt64;
    case DType::kUint8:
    case DType::kBool:
      return NcclType::kUint8;
    case DType::kFloat8E4M3:
      return NcclType::kFloat8E4M3;
    case DType::kFloat8E5M2:
      return NcclType::kFloat8E5M2;
    case DType::kInt16:
      return std::nullopt;
  }
  return std::nullopt;
}

NcclRedOp redOp(ReduceKind reduce, DType dtype) {
  const bool flags = dtype == DType::kBool;
  switch (reduce) {
    case ReduceKind::kSum:
      return flags ? kNcclMax : kNcclSum;
    case ReduceKind::kProduct:
      return flags ? kNcclMin : kNcclProd;
    case ReduceKind::kAvg:
      return kNcclAvg;
    case ReduceKind::kMin:
      return kNcclMin;
    case ReduceKind::kMax:
      return kNcclMax;
    case ReduceKind::kPreMulSum:  // made for each operation
    case ReduceKind::kBand:       // whyUnsupported() refuses these
    case ReduceKind::kBor:
    case ReduceKind::kBxor:
      break;
  }
  return kNcclSum;
}

bool isFloat8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

bool hasFraction(DType dtype) {
  return dtype == DType::kFloat || dtype == DType::kDouble || dtype == DType::kHalf ||
         dtype == DType::kBFloat16;
}

bool multiplies(const Operation& operation) {
  return reduces(operation.kind) && operation.reduce == ReduceKind::kPreMulSum;
}

// A world of one multiplies by a kernel of NCCL's own, with a block for every 16 KiB and 32 at
// most. From 2.19 to 2.29.3 a block's share is count / blocks, rounded down and then up to 16
// bytes, so that some sizes lose up to 31 elements at their end (oneRankReduce() in onerank.cu).
// Whole pieces of 16 KiB divide evenly, and what is smaller has one block.
constexpr size_t kOneRankPiece = 16384;

bool allEqual(const std::vector<Buffer>& buffers) {
  return std::all_of(buffers.begin(), buffers.end(),
                     [&](const Buffer& buffer) { return buffer.bytes == buffers.front().bytes; });
}

// One operation's calls. The first error is kept, and ends them.
class Caller {
 public:
  Caller(const Operation& operation, const CallTarget& target)
      : operation_(operation),
        target_(target),
        type_(reducedAs(operation.dtype).value_or(NcclType::kUint8)),
        op_(redOp(operation.reduce, operation.dtype)) {}

  NcclResult run(bool flat);

 private:
  size_t rank() const { return static_cast<size_t>(target_.rank); }
  bool isRoot() const { return target_.rank == operation_.root; }
  bool good() const { return result_ == NcclResult::kSuccess; }
  void note(NcclResult result) {
    if (good() && result != NcclResult::kInProgress) result_ = result;
  }

  void send(const Buffer& from, int peer) {
    if (good() && from.bytes > 0)
      note(target_.nccl.send(from.data, from.bytes, NcclType::kUint8, peer, target_.comm,
                             target_.stream));
  }
  void recv(const Buffer& into, int peer) {
    if (good() && into.bytes > 0)
      note(target_.nccl.recv(into.data, into.bytes, NcclType::kUint8, peer, target_.comm,
                             target_.stream));
  }
  // Its own part goes the same way, as a copy that NCCL makes in stream order.
  void copyOwn(const Buffer& from, const Buffer& into) {
    if (from.data == into.data) return;
    send(from, target_.rank);
    recv(into, target_.rank);
  }
  void broadcast(const Buffer& from, const Buffer& into, int root) {
    if (good())
      note(target_.nccl.broadcast(from.data, into.data, into.bytes, NcclType::kUint8, root,
                                  target_.comm, target_.stream));
  }
  // call(offset in bytes, elements), once, or twice where NCCL would leave elements out.
  template <typename Call>
  void inParts(const Buffer& buffer, const Call& call) {
    const bool alone = multiplies(operation_) && target_.size == 1;
    const size_t tail = alone && buffer.bytes > kOneRankPiece ? buffer.bytes % kOneRankPiece : 0;
    const size_t head = buffer.bytes - tail;
    if (good()) note(call(0, head / itemSize(operation_.dtype)));
    if (good() && tail > 0) note(call(head, tail / itemSize(operation_.dtype)));
  }
  void reduce(const Buffer& from, uint8_t* into, int root) {
    inParts(from, [&](size_t offset, size_t count) {
      return target_.nccl.reduce(from.data + offset, into == nullptr ? nullptr : into + offset,
                                 count, type_, op_, root, target_.comm, target_.stream);
    });
  }

  NcclResult createReduction();
  void destroyReduction();
  void dispatch(bool flat);
  void allreduce();
  void allgather(bool flat);
  void reduceScatter(bool flat);
  void gather();
  void scatter();
  void alltoall();
  void barrier();

  const Operation& operation_;
  const CallTarget& target_;
  const NcclType type_;
  NcclRedOp op_;
  NcclResult result_ = NcclResult::kSuccess;
};

void Caller::allreduce() {
  const Buffer& values = operation_.outputs[0];
  inParts(values, [&](size_t offset, size_t count) {
    uint8_t* const data = values.data + offset;
    return target_.nccl.allReduce(data, data, count, type_, op_, target_.comm, target_.stream);
  });
}

void Caller::allgather(bool flat) {
  const Buffer& own = operation_.inputs[0];
  const auto& outputs = operation_.outputs;
  if (flat && allEqual(outputs)) {
    note(target_.nccl.allGather(own.data, outputs[0].data, own.bytes, NcclType::kUint8,
                                target_.comm, target_.stream));
    return;
  }
  for (size_t from = 0; from < outputs.size(); ++from) {
    if (outputs[from].bytes == 0) continue;  // on every rank
    broadcast(from == rank() ? own : outputs[from], outputs[from], static_cast<int>(from));
  }
}

void Caller::reduceScatter(bool flat) {
  const auto& inputs = operation_.inputs;
  const Buffer& own = operation_.outputs[0];
  if (flat && allEqual(inputs)) {
    inParts(own, [&](size_t offset, size_t count) {
      return target_.nccl.reduceScatter(inputs[0].data + offset, own.data + offset, count, type_,
                                        op_, target_.comm, target_.stream);
    });
    return;
  }
  for (size_t to = 0; to < inputs.size(); ++to) {
    if (inputs[to].bytes == 0) continue;
    reduce(inputs[to], to == rank() ? own.data : nullptr, static_cast<int>(to));
  }
}

void Caller::gather() {
  const Buffer& own = operation_.inputs[0];
  if (!isRoot()) return send(own, operation_.root);
  for (size_t from = 0; from < operation_.outputs.size(); ++from) {
    const Buffer& into = operation_.outputs[from];
    from == rank() ? copyOwn(own, into) : recv(into, static_cast<int>(from));
  }
}

void Caller::scatter() {
  const Buffer& own = operation_.outputs[0];
  if (!isRoot()) return recv(own, operation_.root);
  for (size_t to = 0; to < operation_.inputs.size(); ++to) {
    const Buffer& from = operation_.inputs[to];
    to == rank() ? copyOwn(from, own) : send(from, static_cast<int>(to));
  }
}

void Caller::alltoall() {
  for (size_t other = 0; other < operation_.inputs.size(); ++other) {
    if (other == rank()) {
      copyOwn(operation_.inputs[other], operation_.outputs[other]);
    } else {
      send(operation_.inputs[other], static_cast<int>(other));
      recv(operation_.outputs[other], static_cast<int>(other));
    }
  }
}

void Caller::barrier() {
  note(target_.nccl.allReduce(target_.scratch, target_.scratch, 1, NcclType::kUint8, kNcclMax,
                              target_.comm, target_.stream));
}

// NCCL's numbers of such reductions belong to one communicator, and its calls look them up before
// they return (hostToDevRedOp() in enqueue.cc, 2.18 to 2.28).
NcclResult Caller::createReduction() {
  const bool on_device = operation_.factor_on_device != nullptr;
  const void* factor =
      on_device ? operation_.factor_on_device : static_cast<const void*>(operation_.factor.data());
  return target_.nccl.createPreMulSum(&op_, factor, on_device, type_, target_.comm);
}

void Caller::destroyReduction() {
  note(target_.nccl.destroyRedOp(op_, target_.comm));
}

NcclResult Caller::run(bool flat) {
  const bool own_reduction = multiplies(operation_);
  if (own_reduction) note(createReduction());
  if (!good()) return result_;
  dispatch(flat);
  if (own_reduction) destroyReduction();
  return result_;
}

void Caller::dispatch(bool flat) {
  switch (operation_.kind) {
    case OpKind::kAllreduce:
      allreduce();
      break;
    case OpKind::kBroadcast:
      broadcast(operation_.outputs[0], operation_.outputs[0], operation_.root);
      break;
    case OpKind::kAllgather:
      allgather(flat);
      break;
    case OpKind::kReduceScatter:
      reduceScatter(flat);
      break;
    case OpKind::kReduce:
      reduce(operation_.inputs[0], isRoot() ? operation_.outputs[0].data : nullptr,
             operation_.root);
      break;
    case OpKind::kGather:
      gather();
      break;
    case OpKind::kScatter:
      scatter();
      break;
    case OpKind::kAlltoall:
      alltoall();
      break;
    case OpKind::kSend:
      send(operation_.inputs[0], target_.peer);
      break;
    case OpKind::kRecv:
      recv(operation_.outputs[0], target_.peer);
      break;
    case OpKind::kBarrier:
      barrier();
      break;
    case OpKind::kSparseAllreduce:
      break;  // refused above
  }
}

}  // namespace

std::string whyUnsupported(const Operation& operation, const NcclApi& nccl) {
  const std::string what =
      std::string(toString(operation.kind)) + " of " + toString(operation.dtype);
  if (operation.kind == OpKind::kRecv && operation.peer < 0)
    return "recv from any source: NCCL needs to know the source";
  if (!reduces(operation.kind)) return {};
  if (!reducedAs(operation.dtype)) return what + ": NCCL cannot reduce this dtype";
  if (multiplies(operation) && !hasFraction(operation.dtype))
    return what + ": NCCL multiplies float, double, half and bfloat16 only before it sums";
  if (operation.reduce >= ReduceKind::kBand) return what + ": NCCL has no bitwise reductions";
  if (operation.dtype == DType::kBool && operation.reduce == ReduceKind::kAvg)
    return what + ": flags have no average";
  if (isFloat8(operation.dtype) && !nccl.has(NcclFeature::kFloat8))
    return what + ": needs NCCL 2.24 or later, found version " + std::to_string(nccl.version());
  return {};
}

NcclResult makeCalls(const Operation& operation, bool flat, const CallTarget& target) {
  return Caller(operation, target).run(flat);
}

}  // namespace torchft_ext
