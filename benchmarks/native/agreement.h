// What it costs the members of an elastic job to agree on a step.
#pragma once

#include "member.h"
#include "report.h"

namespace torchft_ext::bench {

// agree() and, in turns with it, a barrier of the generation. The row's more: how many barriers an
// agreement takes, and the barrier's median in microseconds. Every rank calls it.
Row measureAgree(const Member& member);

}  // namespace torchft_ext::bench
