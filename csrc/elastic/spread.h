// How all members of a view come to know something of each of them: who tells whom, of whom. Pure
// functions.
//
// Directly, each tells each other of itself: one hop, n - 1 messages. Relayed, a member tells the
// ones 1, 2, 4, ... ranks after it, each time of itself and of those before it that it knows of by
// then: as many hops and messages as n has binary digits (the dissemination of Hensgen, Finkel and
// Manber's barrier). Who is told by nobody else depends on each of those in between.
#pragma once

#include <set>
#include <vector>

#include "elastic/view.h"

namespace torchft_ext {

struct Hop {
  MemberId to;
  std::vector<MemberId> about;  // to be told once all of it is known; itself first
  friend bool operator==(const Hop&, const Hop&) = default;
};

// Of a member that is neither, between two of whom the one has lost the other: what each says is
// passed on to the other one.
std::vector<Hop> detoursOf(const std::set<MemberPair>& cut, const MemberId& self);

// Of this member, in the order in which they are due. It is among the ranks.
std::vector<Hop> hopsOf(const std::vector<MemberId>& ranks, const MemberId& self, bool relayed);

}  // namespace torchft_ext
