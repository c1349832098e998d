// c10d's own way to begin a generation (torch 2.14 and later): members are named by handles that
// they exchanged, instead of by rank and world size. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "c10d/store/store_adapter.h"
#include "membership/records.h"

namespace torchft_ext {

// "ft:<incarnation>:<serial>:<host>:<pid>@<store>": one group object of one process's life, and the
// address of its store, "host:port/prefix". It stays the same through all generations. serial: of
// the group object within the process.
std::string makeHandle(const MemberRecord& self, uint64_t serial, const StoreAddress& store);
// As others may use it: a host that means "here" wherever it is read ("localhost", a loopback
// address, 0.0.0.0) becomes the address that this process's peers connect to.
StoreAddress seenByOthers(StoreAddress store, const MemberRecord& self);

struct HandledMembership {
  int rank = 0;
  int size = 1;
  StoreAddress store;  // where they meet: that of the first handle; its prefix is this attempt's
  bool own_store = false;  // it is that of `own`
};
// Ranks are the positions in `handles`. ValueError where they are none of ours, not unique, or
// without `own`, and where the first one's store can be reached on its own host alone, and `own` is
// of another. Two memberships with one uuid (both halves of a split, say) do not meet: the
// prefix names the members too.
HandledMembership membershipOf(const std::vector<std::string>& handles, const std::string& own,
                               int64_t uuid);

}  // namespace torchft_ext
