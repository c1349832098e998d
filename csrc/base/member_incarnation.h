// Incarnations of the members of this process beyond the first, whose incarnation is the process's
// own (comm/member_claims.h). They have one half in common, so that errors can say which ranks were
// one process. Any thread.
#pragma once

#include <array>
#include <cstdint>

#include "base/identity.h"

namespace torchft_ext {

// Another one with each call.
Incarnation newMemberIncarnation();

// The half that all members of a process have in common.
using ProcessPart = std::array<uint8_t, 8>;
ProcessPart processPartOf(const Incarnation& incarnation);

}  // namespace torchft_ext
