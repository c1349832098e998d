// Who keeps connections to whom in a generation: a ring of its members, and chords to those 2, 4, 8
// ... places away on either side.
//
// About 2 log2(n) connections for each of n members, no two members more than log2(n) connections
// apart, and the relation is mutual: what both ends compute from the same members agrees. Pure
// functions.
#pragma once

#include <vector>

namespace torchft_ext {

// ranks: the members present, ascending, self_rank among them. The result is ascending, without
// self_rank.
std::vector<int> overlayNeighbours(int self_rank, const std::vector<int>& ranks);
// The members before and after it on the ring: one or two; none if it is alone.
std::vector<int> ringNeighbours(int self_rank, const std::vector<int>& ranks);

}  // namespace torchft_ext
