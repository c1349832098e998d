// c10d's own way to begin an epoch (torch 2.14 and later): members are named by handles that they
// exchanged, instead of by rank and world size. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rendezvous/rendezvous.h"

namespace torchft_ext {

// "ft:<incarnation>:<serial>:<host>:<pid>": one group object of one process's life. It stays the
// same through all epochs. serial: of the group object within the process.
std::string makeHandle(const MemberRecord& self, uint64_t serial);

struct HandledMembership {
  int rank = 0;
  int size = 1;
  std::string prefix;  // of this attempt's keys, the same on all members
};
// Ranks are the positions in `handles`. ValueError where they are none of ours, not unique, or
// without `own`. Two memberships with one uuid (both halves of a split, say) do not meet: the
// prefix names the members too.
HandledMembership membershipOf(const std::vector<std::string>& handles, const std::string& own,
                               int64_t uuid);

}  // namespace torchft_ext
