// From an operation to NCCL's calls. Which calls, in which order, depends only on what all ranks
// know alike (kind, sizes, root, StreamSide::flat), so that the ranks' calls always pair.
//
// What only moves data moves bytes, whatever its dtype. What reduces needs a dtype that NCCL has;
// bool is reduced as uint8 (a sum is "any", so MAX; a product is "all", so MIN).
// For a kPreMulSum a reduction is made in the communicator, and destroyed when the calls are made.
// In a world of one it takes two calls where NCCL's kernel would leave elements out.
//
// Threads: any. Nothing here blocks, throws or keeps anything.
#pragma once

#include <string>

#include "comm/operation.h"
#include "nccl/nccl_api.h"

namespace torchft_ext {

// Why NCCL cannot do it ("reduce_scatter of int16: ..."). Empty: it can.
std::string whyUnsupported(const Operation& operation, const NcclApi& nccl);

struct CallTarget {
  NcclApi& nccl;
  NcclComm comm = nullptr;
  NativeStream stream = nullptr;
  int rank = 0;  // in comm
  int size = 1;
  int peer = -1;            // of send and recv: rank in comm
  void* scratch = nullptr;  // one byte of device memory, for barriers
};

// Makes the operation's calls; the caller brackets them in a group. kSuccess, or the first result
// that is an error.
NcclResult makeCalls(const Operation& operation, bool flat, const CallTarget& target);

}  // namespace torchft_ext
