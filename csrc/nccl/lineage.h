// From which communicator another may be made: NCCL's shrink and split take one of all ranks on to
// a later epoch. Pure functions over what all its ranks know alike.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/identity.h"

namespace torchft_ext {

// Of an epoch's communicator of all ranks.
struct Lineage {
  std::vector<Incarnation> members;  // of its epoch, by rank
  uint64_t id = 0;                   // the same on all its ranks; never 0
  std::weak_ptr<const void> heir;    // whose next epochs may go on from it: expired with its engine
};

// Of an epoch's first communicator of all ranks, and of the n-th after it: each device has one of
// its own, and which device it is may differ between ranks.
uint64_t lineageId(const Nonce& nonce);
uint64_t nthOfEpoch(uint64_t first, uint64_t n);

// The ranks of `old` to be left out, so that `now` is what stays, in its order; none: the same
// members. nullopt: no such way leads there, or there is nobody to talk to.
std::optional<std::vector<int>> leftOut(const std::vector<Incarnation>& old,
                                        const std::vector<Incarnation>& now);

}  // namespace torchft_ext
