// The seam to NCCL: the one interface through which anything here calls nccl*. Two implementations:
// the library that is found at run time, and the simulator of tests/sim.
//
// Threads: any, with NCCL's own rules, which are the caller's to keep: group calls nest per thread;
// one thread at a time per communicator, asyncError() and abort() serialised with each other too;
// after kInProgress no call on that communicator but asyncError() and abort(); revoke() only right
// after asyncError() has said that it is quiet and sound. Nothing here throws, logs or takes locks.
//
// Of blocking communicators nothing is ever kInProgress: calls, and a group's end, return when NCCL
// is through, which may need all ranks. While one is inside, another thread may call abort() in a
// group of its own, which raises the flags that end the call's waits for peers; the end of that
// group, which frees the communicator, only once nobody is inside (kDeferredAbort).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nccl/nccl_types.h"

namespace torchft_ext {

// By the version that brought it; asked at run time.
enum class NcclFeature {
  kDeferredAbort,  // 2.22.3: in a group an abort sets flags, and frees at the group's end
  kScalableInit,   // 2.23
  kFloat8,         // 2.24
  kSafeAbort,      // 2.26.2: before it an abort can hang
  kRevoke,         // 2.28.7
};

struct NcclInit {
  int rank = 0;
  int size = 1;
  std::vector<NcclUniqueId> ids;  // one; several with kScalableInit
  bool blocking = false;
};

class NcclApi {
 public:
  virtual ~NcclApi() = default;

  virtual int version() const = 0;  // 22809: 2.28.9
  virtual bool has(NcclFeature feature) const = 0;
  virtual std::string lastError(NcclComm comm) = 0;  // comm may be null

  virtual NcclResult getUniqueId(NcclUniqueId* id) = 0;
  // What is behind an id that this process asked for, and that comes to nothing, ends. Blocks for
  // half a second at most.
  virtual void releaseRoot(const NcclUniqueId& id) = 0;
  // Non-blocking: mostly kInProgress, with *comm set; asyncError() tells when it is ready.
  // Blocking: inside a group, kSuccess with *comm set; the group's end returns when it is ready.
  // NCCL may write *comm on a thread of its own until asyncError() is no longer kInProgress, or its
  // abort() has returned: it must live so long.
  virtual NcclResult init(NcclComm* comm, const NcclInit& init) = 0;
  virtual NcclResult asyncError(NcclComm comm, NcclResult* state) = 0;
  virtual NcclResult finalize(NcclComm comm) = 0;
  virtual NcclResult destroy(NcclComm comm) = 0;
  virtual NcclResult abort(NcclComm comm) = 0;   // frees it; inside a group at its end
  virtual NcclResult revoke(NcclComm comm) = 0;  // stops its kernels, frees nothing

  virtual NcclResult groupStart() = 0;
  virtual NcclResult groupEnd() = 0;

  // Buffers are device memory; counts are elements, as in nccl.h.
  virtual NcclResult allReduce(const void* in, void* out, size_t count, NcclType type, NcclRedOp op,
                               NcclComm comm, NativeStream stream) = 0;
  virtual NcclResult broadcast(const void* in, void* out, size_t count, NcclType type, int root,
                               NcclComm comm, NativeStream stream) = 0;
  virtual NcclResult reduce(const void* in, void* out, size_t count, NcclType type, NcclRedOp op,
                            int root, NcclComm comm, NativeStream stream) = 0;
  virtual NcclResult allGather(const void* in, void* out, size_t count, NcclType type,
                               NcclComm comm, NativeStream stream) = 0;
  virtual NcclResult reduceScatter(const void* in, void* out, size_t count, NcclType type,
                                   NcclRedOp op, NcclComm comm, NativeStream stream) = 0;
  virtual NcclResult send(const void* in, size_t count, NcclType type, int peer, NcclComm comm,
                          NativeStream stream) = 0;
  virtual NcclResult recv(void* out, size_t count, NcclType type, int peer, NcclComm comm,
                          NativeStream stream) = 0;

  // An operation that multiplies by *scalar (of that type) before it sums. In host memory it is
  // read at once, in device memory whenever the operation runs.
  virtual NcclResult createPreMulSum(NcclRedOp* op, const void* scalar, bool on_device,
                                     NcclType type, NcclComm comm) = 0;
  // As soon as the last call that was given it has returned, the group's end not awaited.
  virtual NcclResult destroyRedOp(NcclRedOp op, NcclComm comm) = 0;

  virtual NcclResult registerBuffer(NcclComm comm, void* data, size_t bytes, void** handle) = 0;
  virtual NcclResult deregisterBuffer(NcclComm comm, void* handle) = 0;
};

}  // namespace torchft_ext
