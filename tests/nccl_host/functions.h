// Which operation, on which type, a kernel function of NCCL does.
#pragma once

#include <optional>
#include <string>

#include "library_symbols.h"
#include "nccl/nccl_types.h"

namespace torchft_ext::nccl_host {

enum class Collection { kTransfers, kAllGather, kBroadcast, kAllReduce, kReduce, kReduceScatter };
enum class DeviceOp { kSum, kProduct, kMinMax, kPreMulSum, kSumPostDivide };

struct Function {
  Collection what = Collection::kTransfers;
  DeviceOp op = DeviceOp::kSum;
  NcclType type = NcclType::kInt8;
};

// By the number that a batch of work carries. Empty: none of those with ring and Simple.
class Functions {
 public:
  explicit Functions(const LibrarySymbols& symbols);
  std::optional<Function> at(unsigned number) const;

 private:
  std::map<unsigned, Function> known_;
};

}  // namespace torchft_ext::nccl_host
