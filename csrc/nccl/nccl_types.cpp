#include "nccl/nccl_types.h"

namespace torchft_ext {

const char* toString(NcclResult result) {
  switch (result) {
    case NcclResult::kSuccess:
      return "success";
    case NcclResult::kUnhandledCudaError:
      return "unhandled CUDA error";
    case NcclResult::kSystemError:
      return "system error";
    case NcclResult::kInternalError:
      return "internal error";
    case NcclResult::kInvalidArgument:
      return "invalid argument";
    case NcclResult::kInvalidUsage:
      return "invalid usage";
    case NcclResult::kRemoteError:
      return "remote error";
    case NcclResult::kInProgress:
      return "in progress";
    case NcclResult::kTimeout:
      return "timeout";
  }
  return "unknown result";
}

std::string dottedVersion(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace torchft_ext
