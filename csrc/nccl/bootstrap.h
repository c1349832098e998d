// How the ranks of a new NCCL communicator get its unique ids: over the generation's control
// communicator, from the lowest rank, by messages along a tree of its ranks. There is one id, or,
// in large worlds with a library that can (2.23), one for each part of the ranks: the first rank of
// a part makes it and sends it to the lowest one. So no process has to serve all ranks.
//
// Messages alone, under tags that no user's operation can have (operation.h): an id never enters
// the sequence of the user's own collectives on host memory, which other threads issue in another
// order on each rank. Tag and message both say for which communicator an id is: for all ranks or
// for two, and the how-manyeth of its kind. Before that the ranks meet, up the tree and down again.
//
// Threads: the issuing thread. Blocks until the id has come, until the deadline at most, calls the
// wait hook (which may throw), and ends with the generation. What has still to be passed on when it
// returns is sent by the control communicator, which fails the generation where that cannot be
// done.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "nccl/nccl_types.h"

namespace torchft_ext {

struct Bootstrap {
  Communicator& control;
  std::shared_ptr<Lifecycle> lifecycle;
  // The operation that needs the communicator: what messages name.
  OpKind kind = OpKind::kBarrier;
  int64_t seq = -1;
  Deadline deadline = Deadline::never();
  int device_type = 0;
  uint64_t ordinal = 0;  // how many communicators these ranks made before in this generation
  int peer = -1;         // the other rank; -1: all ranks
  int roots = 1;         // how many ids
  bool meets = false;    // its messages: those of the ranks that meet; else the ids
};

// All ranks have come to this communicator. Before anything of NCCL's is made for it: what waits
// there for ranks hears of no abort, and is freed only when they come (NCCL 2.18 to 2.31). False:
// the generation is over, or the deadline has passed.
bool meet(Bootstrap bootstrap);

// own: the id that this rank has made, if it is the first of a part; null elsewhere. nullopt: the
// generation is over (it has failed if the ranks did not agree), or the deadline has passed.
std::optional<std::vector<NcclUniqueId>> spreadUniqueIds(const Bootstrap& bootstrap,
                                                         const NcclUniqueId* own);

// NCCL's own parts: as equal as can be, the larger ones first.
int rootsFor(int size, int ranks_per_root);  // at least one
int firstRankOfPart(int part, int size, int roots);
// Whether the rank is the first of a part.
bool makesId(int rank, int size, int roots);

// The tag of its messages.
uint64_t tagOf(const Bootstrap& bootstrap);

// Whom rank r of `size` gets the id from (-1: nobody, it is the root), and to whom it passes it on.
struct TreePlace {
  int parent = -1;
  std::vector<int> children;
};
TreePlace placeInTree(int rank, int size);

}  // namespace torchft_ext
