#include "functions.h"

#include <stdexcept>

#include "device_layout.h"

namespace torchft_ext::nccl_host {
namespace {

constexpr int kTypes = 12;
constexpr int kOps = 5;
constexpr int kRing = 1;  // of the algorithms of an allreduce

// How many algorithms the rows of NCCL's table have, in its order.
constexpr int kAllGatherAlgorithms = 4;
constexpr int kAllReduceAlgorithms = 6;
constexpr int kReduceScatterAlgorithms = 4;

}  // namespace

// NCCL numbers its device functions by a table of rows; the same number may serve several types.
// The order of rows was read in src/include/device.h of 2.28.
Functions::Functions(const LibrarySymbols& symbols) {
  const auto* numbers = static_cast<const int*>(symbols.find("ncclDevFuncRowToId"));
  if (numbers == nullptr) throw std::runtime_error("NCCL has no table of its device functions");
  int row = 0;
  const auto note = [&](int at, Function function) {
    if (numbers[at] >= 0) known_.emplace(static_cast<unsigned>(numbers[at]), function);
  };
  note(row++, {Collection::kTransfers});
  note(row + kSimple, {Collection::kAllGather});
  row += kAllGatherAlgorithms * kProtocols;
  note(row + kSimple, {Collection::kBroadcast});
  row += kProtocols;
  const auto reductions = [&](Collection what, int algorithms, int algorithm) {
    for (int op = 0; op < kOps; ++op) {
      for (int type = 0; type < kTypes; ++type) {
        note(row + ((op * kTypes + type) * algorithms + algorithm) * kProtocols + kSimple,
             {what, static_cast<DeviceOp>(op), static_cast<NcclType>(type)});
      }
    }
    row += kOps * kTypes * algorithms * kProtocols;
  };
  reductions(Collection::kAllReduce, kAllReduceAlgorithms, kRing);
  reductions(Collection::kReduce, 1, 0);
  reductions(Collection::kReduceScatter, kReduceScatterAlgorithms, 0);
}

std::optional<Function> Functions::at(unsigned number) const {
  const auto found = known_.find(number);
  if (found == known_.end()) return std::nullopt;
  return found->second;
}

}  // namespace torchft_ext::nccl_host
