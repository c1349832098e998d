// nccl.h as this library calls it: its declarations without the header, so that one build serves
// every version of the library. tests/nccl/declarations.cpp compares them with the headers of real
// ones.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "nccl/nccl_types.h"

namespace torchft_ext {

constexpr unsigned int kNcclConfigVersion = 21801;  // non-blocking since 2.14

// ncclConfig_t as 2.18 had it. Later versions append fields and take the caller's `size` and
// `version` to know which are there, so this one is accepted by all of them (nccl.h and
// parseCommConfig() in init.cc, 2.18 to 2.31).
struct NcclConfig {
  static constexpr int kUnset = INT_MIN;

  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = kNcclConfigVersion;
  int blocking = 0;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = 0;  // shared resources would share the abort flag
};

constexpr int kNcclScalarDevice = 0;         // ncclScalarDevice
constexpr int kNcclScalarHostImmediate = 1;  // ncclScalarHostImmediate
constexpr int kNcclRevokeDefault = 0;        // NCCL_REVOKE_DEFAULT

// The functions, by name. Enumerations travel as int.
struct NcclEntryPoints {
  using Stream = NativeStream;
  int (*GetVersion)(int*) = nullptr;
  const char* (*GetLastError)(NcclComm) = nullptr;
  int (*GetUniqueId)(NcclUniqueId*) = nullptr;
  int (*CommInitRankConfig)(NcclComm*, int, NcclUniqueId, int, NcclConfig*) = nullptr;
  int (*CommInitRankScalable)(NcclComm*, int, int, int, NcclUniqueId*, NcclConfig*) = nullptr;
  int (*CommGetAsyncError)(NcclComm, int*) = nullptr;
  int (*CommFinalize)(NcclComm) = nullptr;
  int (*CommDestroy)(NcclComm) = nullptr;
  int (*CommAbort)(NcclComm) = nullptr;
  int (*CommRevoke)(NcclComm, int) = nullptr;
  int (*CommRegister)(NcclComm, void*, size_t, void**) = nullptr;
  int (*CommDeregister)(NcclComm, void*) = nullptr;
  int (*GroupStart)() = nullptr;
  int (*GroupEnd)() = nullptr;
  int (*AllReduce)(const void*, void*, size_t, int, int, NcclComm, Stream) = nullptr;
  int (*Broadcast)(const void*, void*, size_t, int, int, NcclComm, Stream) = nullptr;
  int (*Reduce)(const void*, void*, size_t, int, int, int, NcclComm, Stream) = nullptr;
  int (*AllGather)(const void*, void*, size_t, int, NcclComm, Stream) = nullptr;
  int (*ReduceScatter)(const void*, void*, size_t, int, int, NcclComm, Stream) = nullptr;
  int (*Send)(const void*, size_t, int, int, NcclComm, Stream) = nullptr;
  int (*Recv)(void*, size_t, int, int, NcclComm, Stream) = nullptr;
  int (*RedOpCreatePreMulSum)(int*, void*, int, int, NcclComm) = nullptr;
  int (*RedOpDestroy)(int, NcclComm) = nullptr;
};

// Looks all of them up in a library of dlopen()'s. Returns the required ones that are not there, by
// their names and with commas between; those that later versions brought stay null.
std::string lookUpNccl(void* library, NcclEntryPoints& entry);

}  // namespace torchft_ext
