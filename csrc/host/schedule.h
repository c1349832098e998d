// What one rank does in one collective: steps with dependencies. Pure data made by pure functions,
// so that every algorithm is tested without a socket, over every world size.
//
// Rules. Sends to one peer go out in list order; receives from one peer are matched in list order;
// the frames of one pair match one to one, with the same bytes. A step begins when the steps in
// `after` are done: a send is done when the kernel has its bytes, a receive when its bytes are
// placed (and reduced). No step with zero bytes. Results are bit-identical on all ranks: each
// element is reduced in one fixed order by one owner, or by commutative pairwise exchange.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/operation.h"

namespace torchft_ext {

struct Step {
  enum class Kind : uint8_t {
    kSend,        // data -> peer
    kRecv,        // peer -> data
    kRecvReduce,  // peer -> staging, then data = data (op) staging
    kCopy,        // from -> data
    kReduce,      // data = data (op) from
    kAverage,     // data = data / world size
    kScale,       // data = from * factor
  };
  Kind kind = Kind::kCopy;
  int peer = -1;
  uint8_t* data = nullptr;
  const uint8_t* from = nullptr;
  size_t bytes = 0;
  std::array<int32_t, 3> after{-1, -1, -1};  // indices of earlier steps
};

struct Schedule {
  std::vector<Step> steps;
  std::vector<std::unique_ptr<uint8_t[]>> scratch;  // lives as long as the schedule
};

struct ScheduleTuning {
  size_t chunk_bytes = 512 * 1024;  // of pipelined steps
  size_t small_bytes = 32 * 1024;   // a rank, up to here: logarithmic steps
  int direct_world = 8;             // up to here: owner-direct; above: ring
};

// For every kind but send and recv.
Schedule makeSchedule(const Operation& operation, int rank, int size, const ScheduleTuning& tuning);
// Broadcast, reduce, gather, scatter: members have different parts.
bool hasRoot(OpKind kind);
// Equal on all ranks that issued the same operation: kind, dtype, reduction, root, total bytes
// where the kind fixes them, and the layout of a bucket. Sent with every frame, so that
// desynchronised ranks get an error instead of a wrong sum.
uint64_t signatureOf(const Operation& operation);
// Of a send and of the recv that it may match; as in Operation.
uint64_t signatureOfMessage(DType dtype, uint8_t torch_dtype = 0);
// "int32"; "uint16", as torch names it.
std::string nameOfItems(DType dtype, uint8_t torch_dtype);
// What another rank's signature says: "allreduce (sum) of float32". Total: any bits give a text.
std::string describeSignature(uint64_t signature);
// Whether these are signatures of buckets, of which nothing but the layout differs.
bool differInLayout(uint64_t one, uint64_t other);
// How a member's operation differs from this rank's, of which both are that collective of the
// generation.
std::string describeDifference(uint64_t theirs, uint64_t ours, uint64_t number, int rank);

}  // namespace torchft_ext
