// The table of plans: which plan runs a collective in shared memory, by the operation, the number
// of ranks, whether each rank has a core, and the size. All members of a generation need equal
// tables; they compare digests while it forms.
//
// As text, a row is a line of words; '#' begins a comment:
//
//   # operation  ranks  cores   up to  plan    chunk
//   allreduce    2-64   few     64K    once
//   allreduce    any    any     any    slices  128K
//
// The first row that fits counts. `cores` is "few" where a member has fewer of them than there are
// ranks, "enough" otherwise. `up to` is the size of what a rank gives, in bytes, K or M; of a
// scatter or reduce_scatter that is the largest part, times the ranks. `chunk` is how many bytes go
// through a slot at once; nothing, or "slot", is a whole slot.
//
// Values; threads: any. Nothing here blocks. A table that cannot be used is never made.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "comm/operation.h"

namespace torchft_ext {

enum class SharedPlan : uint8_t {
  kLine,    // in the line of the publication itself: 80 bytes at most
  kOnce,    // allreduce: one publication, and each rank reduces all of it: a slot at most
  kSlices,  // allreduce: chunk by chunk, of which each rank reduces its slice for all
  kChunks,  // the others: chunk by chunk
};
inline constexpr size_t kSharedPlans = 4;
const char* toString(SharedPlan plan);

inline constexpr int kMostSharing = 64;  // members of a generation that can share memory
// Of one slot: all slots of a generation fit into a third-level cache of 8 MiB.
size_t sharedSlotBytes(int size);

inline constexpr size_t kAnySize = std::numeric_limits<size_t>::max();

struct SharedPlanRow {
  enum class Cores : uint8_t { kAny, kFew, kEnough };
  OpKind kind = OpKind::kAllreduce;
  int from_ranks = 2;
  int to_ranks = kMostSharing;
  Cores cores = Cores::kAny;
  size_t up_to = kAnySize;
  SharedPlan plan = SharedPlan::kChunks;
  size_t chunk_bytes = 0;  // 0: a slot
};

// What a generation uses of a table.
class SharedPlans {
 public:
  explicit SharedPlans(const std::vector<SharedPlanRow>& rows);
  // Not for sends, receives and barriers.
  const SharedPlanRow& of(OpKind kind, size_t bytes) const;

 private:
  std::array<std::vector<SharedPlanRow>, kOpKinds> rows_;  // by kind; the last has no bound
};

class SharedPlanTable {
 public:
  SharedPlanTable();  // the built-in one
  // The built-in one, in which each operation that is named has these rows and no others. A string:
  // which line cannot be used, and why.
  static std::variant<SharedPlanTable, std::string> parse(std::string_view text);

  std::string text() const;  // as parse() reads it; all rows
  // For operations with plans, in the order of kPlannedKinds.
  static constexpr std::array<OpKind, 8> kPlannedKinds = {
      OpKind::kAllreduce, OpKind::kBroadcast, OpKind::kAllgather, OpKind::kReduceScatter,
      OpKind::kReduce,    OpKind::kGather,    OpKind::kScatter,   OpKind::kAlltoall};
  using Digests = std::array<uint32_t, kPlannedKinds.size()>;
  Digests digests() const;
  uint32_t digest() const;  // of all
  // For so many ranks, of which each has a core or not.
  SharedPlans plansFor(int size, bool few_cores) const;

 private:
  std::vector<SharedPlanRow> rows_;
};

// The operations of which these differ: "allreduce, gather". Empty: none.
std::string nameDifferences(const SharedPlanTable::Digests& one,
                            const SharedPlanTable::Digests& other);
uint32_t digestOf(const SharedPlanTable::Digests& digests);

}  // namespace torchft_ext
