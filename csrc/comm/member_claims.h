// Which of this process's members goes to a meeting place.
//
// A process is one member of a generation: member 0, whose incarnation is the process's. Where
// threads are ranks, it is several: each has an engine of its own (Engine::forMember()), so an
// incarnation, a listener, a loop and a peer monitor. For all others they are processes of one pid.
// So nothing in the protocol, the rosters or the overlay knows of them.
//
// Each attempt of a group claims a member for its meeting place and its rank, until the generation
// that comes of it is over. Two claims at one place with different ranks never get one member. A
// group keeps its member where it can, since others remember it by its incarnation. The choice is
// made here alone, without a word to others. Threads: any; never blocks.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "comm/lifecycle.h"

namespace torchft_ext {

// place: store and prefix. wanted: the group's member so far. claimant: the claim ends with it.
int claimMember(const std::string& place, int rank, std::optional<int> wanted,
                const std::shared_ptr<const Lifecycle>& claimant);

}  // namespace torchft_ext
