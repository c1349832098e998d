// NCCL's C types as its stable ABI has them, so that nothing here needs nccl.h: the library is
// found at run time, and may be another version than any header at hand. tests/nccl compares them
// with nccl.h of 2.18 to 2.32.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace torchft_ext {

struct NcclCommTag;
using NcclComm = NcclCommTag*;  // ncclComm_t

struct NcclUniqueId {  // ncclUniqueId
  std::array<char, 128> bytes{};
};

enum class NcclResult : int {  // ncclResult_t
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,  // by 2.30.7
};
const char* toString(NcclResult result);
std::string dottedVersion(int version);  // 22809: "2.28.9"

enum class NcclType : int {  // ncclDataType_t
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9,
  kFloat8E4M3 = 10,  // since 2.24
  kFloat8E5M2 = 11,
};

using NcclRedOp = int;  // ncclRedOp_t: built-in ones below, created ones above 4
constexpr NcclRedOp kNcclSum = 0;
constexpr NcclRedOp kNcclProd = 1;
constexpr NcclRedOp kNcclMax = 2;
constexpr NcclRedOp kNcclMin = 3;
constexpr NcclRedOp kNcclAvg = 4;

using NativeStream = void*;  // cudaStream_t

}  // namespace torchft_ext
