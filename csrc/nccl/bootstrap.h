// How the ranks of a new NCCL communicator get its unique id: over the epoch's control
// communicator, from the lowest rank. A broadcast for all ranks; a message under a reserved tag for
// two, so that nobody else has to come.
//
// Threads: the issuing thread. Blocks until the deadline at most, calls the wait hook (which may
// throw), and ends with the epoch.
#pragma once

#include <memory>
#include <optional>

#include "comm/communicator.h"
#include "nccl/nccl_types.h"

namespace torchft_ext {

// Of messages; never the tag of a user's.
constexpr uint64_t kBootstrapTag = uint64_t{1} << 63;

struct Bootstrap {
  Communicator& control;
  std::shared_ptr<Lifecycle> lifecycle;
  // The operation that needs the communicator: what messages name.
  OpKind kind = OpKind::kBarrier;
  int64_t seq = -1;
  Deadline deadline = Deadline::never();
  int device_type = 0;
  uint64_t ordinal = 0;  // how many communicators these ranks made before in this epoch
  int peer = -1;         // the other rank; -1: all ranks
};

// own: the id, on the lowest rank; null elsewhere. nullopt: the epoch is over (it has failed if the
// ranks did not agree), or the deadline has passed.
std::optional<NcclUniqueId> spreadUniqueId(const Bootstrap& bootstrap, const NcclUniqueId* own);

}  // namespace torchft_ext
