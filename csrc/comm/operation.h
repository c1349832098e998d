// One operation as every engine sees it: a kind and buffers. No torch types below c10d/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "comm/exchanges.h"
#include "comm/strided_copy.h"

namespace torchft_ext {

enum class OpKind : uint8_t {
  kAllreduce,
  kBroadcast,
  kAllgather,
  kReduceScatter,
  kReduce,
  kGather,
  kScatter,
  kAlltoall,
  kSend,
  kRecv,
  kBarrier,
  kSparseAllreduce,  // host memory only
};
inline constexpr size_t kOpKinds = static_cast<size_t>(OpKind::kSparseAllreduce) + 1;
inline bool isCollective(OpKind kind) {
  return kind != OpKind::kSend && kind != OpKind::kRecv;
}
const char* toString(OpKind kind);  // torch's names: "allreduce", "reduce_scatter", ...

// In place of a place among the collectives that all ranks issue in one order: it has none.
inline constexpr uint64_t kNoPlace = ~uint64_t{0};

enum class DType : uint8_t {
  kFloat,
  kDouble,
  kHalf,
  kBFloat16,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUint8,
  kBool,
  kFloat8E4M3,  // device engines only, as the next
  kFloat8E5M2,
};
size_t itemSize(DType dtype);
const char* toString(DType dtype);

// kPreMulSum: the sum of each rank's contribution times its Operation::factor; float, double, half
// and bfloat16. The last three: integers and bool, host memory only.
enum class ReduceKind : uint8_t {
  kSum,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kPreMulSum,
  kBand,
  kBor,
  kBxor
};
const char* toString(ReduceKind kind);

// The sizes of the tensors on one side of an operation, for the recorder alone. Several tensors of
// one shape have their number as a first dimension.
struct Shape {
  static constexpr size_t kMostDimensions = 6;  // the last one holds the product of all that follow
  static constexpr uint8_t kUnknown = 255;      // counted from the buffers
  uint8_t dimensions = kUnknown;
  std::array<int64_t, kMostDimensions> sizes{};

  void add(int64_t size) {
    if (dimensions < kMostDimensions)
      sizes[dimensions++] = size;
    else
      sizes.back() *= size;
  }
};

struct Buffer {
  uint8_t* data = nullptr;
  size_t bytes = 0;
};

// What an operation on device memory has beside its buffers: streams and events. Its engine knows
// what it is; nobody else looks inside.
class DeviceSide {
 public:
  virtual ~DeviceSide() = default;
};

// Tags with this bit are for what engines send among themselves, never for a user's messages.
constexpr uint64_t kEngineTag = uint64_t{1} << 63;

// Which buffers a kind has (W = world size; all contiguous; inputs are never written unless they
// are also outputs; an input may be the same memory as an output only where "in place" stands):
//   allreduce         outputs[0], in place
//   broadcast         outputs[0], in place; the root's is the source
//   allgather         inputs[0] -> outputs[W]; outputs[rank] may be the input; sizes may differ
//   reduce_scatter    inputs[W] -> outputs[0], which may be inputs[rank], = the reduction of
//                     everyone's inputs[rank]; host memory: the inputs' sizes may differ, the same
//                     on all
//   reduce            inputs[0] -> root's outputs[0], which may be its input; others have no output
//   gather            inputs[0] -> root's outputs[W]
//   scatter           root's inputs[W] -> outputs[0]
//   alltoall          inputs[W] -> outputs[W], inputs[i] goes to rank i; sizes may differ
//   send / recv       inputs[0] to `peer` / outputs[0] from `peer` (recv: -1 any)
//   barrier           none
//   sparse_allreduce  has `exchanges`; each has the buffers of an allgather
struct Operation {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUint8;
  ReduceKind reduce = ReduceKind::kSum;
  std::array<uint8_t, 8> factor{};  // of kPreMulSum: one item of `dtype`
  uint8_t torch_dtype = 0;          // of a message whose items no DType names: torch's number
                                    // of theirs, plus one. 0: `dtype` names them
  const void* factor_on_device = nullptr;  // in its place: read there when the operation runs
  int root = 0;
  int peer = -1;
  uint64_t tag = 0;
  // Of a collective on host memory that a callback has issued: its name in the generation, alike on
  // all ranks (callback_path.h), and what errors call it. Zero: it has its place in the threads'
  // order.
  uint64_t name = 0;
  std::string described;
  // A callback without a name issued it; its place in that order is by chance.
  bool in_nameless_callback = false;
  int64_t generation = -1;  // the generation whose rank and size the buffers are laid out for; in
                            // another one it fails. -1: any
  // Of a bucket of several tensors: a digest of how they lie in it, the same on all ranks. Engines
  // that compare what ranks issue compare it too. 0: no bucket.
  uint64_t layout = 0;
  // Of a kRecv without a buffer: not for a message. It fails as soon as a member leaves of whom no
  // earlier watch has told, and the generation stays as it is. It does not hold up this rank's own
  // goodbye, which ends it.
  bool watches = false;
  // Its issuer's next step is to wait for it, on the same thread.
  bool waited = false;
  std::vector<Buffer> inputs;
  std::vector<Buffer> outputs;
  Shape input_shape;  // of the callers' tensors, which the buffers are cut from
  Shape output_shape;
  Duration timeout{0};                 // its limit, counted from issue
  std::shared_ptr<DeviceSide> device;  // null: host memory
  // Of a host operation whose tensors are on a device: what takes them through host memory
  // (staged/). Until then the buffers are the device's. Null: they are host memory.
  std::shared_ptr<DeviceSide> staged;
  std::shared_ptr<void> keep_alive;  // whatever owns the buffers; released after completion
  // Host memory: what is copied to the buffers when the operation's turn has come, and from them
  // when it is through, before a success is told. May be empty.
  std::vector<StridedCopy> loads;
  std::vector<StridedCopy> stores;
  std::shared_ptr<Exchanges> exchanges;  // null: one exchange is all; host memory only
};

}  // namespace torchft_ext
