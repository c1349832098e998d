// All members of a host in one process, each with mappings of its own: for tests of what they do in
// shared memory.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "host/shared_execution.h"

namespace torchft_ext::shared_test {

// The memory of each member, all mapped by all.
inline std::vector<std::shared_ptr<SharedMemory>> memoriesOf(int size, size_t slot_bytes) {
  std::vector<std::shared_ptr<SharedMemory>> memories;
  std::string why;
  for (int rank = 0; rank < size; ++rank) {
    memories.push_back(SharedMemory::reserve(size, SharedBoard::regionBytes(slot_bytes), &why));
    EXPECT_TRUE(memories.back()->mapOwn(rank, &why)) << why;
  }
  for (int rank = 0; rank < size; ++rank) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const int theirs = memories[static_cast<size_t>(peer)]->ownDescriptor();
      UniqueFd descriptor(::fcntl(theirs, F_DUPFD_CLOEXEC, 0));
      EXPECT_TRUE(memories[static_cast<size_t>(rank)]->mapPeer(peer, std::move(descriptor), &why))
          << why;
    }
  }
  for (const auto& memory : memories) memory->closeOwnDescriptor();
  return memories;
}

// The built-in plans, or those of this text; slots may be smaller than any table expects.
inline SharedPlans plansOf(int size, const std::string& text = "") {
  const auto table = SharedPlanTable::parse(text);
  EXPECT_TRUE(std::holds_alternative<SharedPlanTable>(table)) << std::get<std::string>(table);
  return std::get<SharedPlanTable>(table).plansFor(std::max(size, 2), false);
}

class SharedWorld {
 public:
  SharedWorld(int size, size_t slot_bytes, const std::string& plans = "") : size_(size) {
    const auto memories = memoriesOf(size, slot_bytes);
    for (int rank = 0; rank < size; ++rank) {
      boards_.push_back(
          std::make_unique<SharedBoard>(memories[at(rank)], rank, size, [this, rank](int peer) {
            nudged_.insert({rank, peer});
          }));
      uses_.push_back(std::make_shared<SharedUse>());
      executions_.push_back(std::make_unique<SharedExecution>(*boards_.back(), rank, size,
                                                              plansOf(size, plans), uses_.back()));
    }
  }

  int size() const { return size_; }
  SharedBoard& board(int rank) { return *boards_[at(rank)]; }
  SharedExecution& execution(int rank) { return *executions_[at(rank)]; }
  uint64_t used(int rank, SharedPlan plan) const {
    return uses_[at(rank)]->by_plan[static_cast<size_t>(plan)].load();
  }
  // (by whom, who)
  std::set<std::pair<int, int>>& nudged() { return nudged_; }

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }

  const int size_;
  std::set<std::pair<int, int>> nudged_;
  std::vector<std::unique_ptr<SharedBoard>> boards_;
  std::vector<std::shared_ptr<SharedUse>> uses_;
  std::vector<std::unique_ptr<SharedExecution>> executions_;
};

}  // namespace torchft_ext::shared_test
