// NCCL's kernels on the host: what a plan that NCCL's host code has made says, done by threads.
//
// Only the ring algorithm and the Simple protocol (environment() of nccl_host.h asks for them),
// over buffers that are not registered. Anything else is a violation (sim_faults.h), and ends the
// kernel. An abort ends a kernel in every wait, as it does NCCL's; its steps are not brought to an
// end.
//
// A kernel runs as one task of its stream: on the stream's thread, and on a thread of its own for
// each further channel and transfer.
#pragma once

#include <vector>

#include "sim_stream.h"

namespace torchft_ext::nccl_host {

class LibrarySymbols;
// Whose kernels are launched. Once, before the first launch.
void setLibrary(const LibrarySymbols* symbols);

// False: a kernel that is none of these. `arguments`: as NCCL packs them.
bool launchPlan(const void* function, std::vector<char> arguments, sim::SimStream& stream);
bool launchOneRank(const void* function, void** arguments, sim::SimStream& stream);

}  // namespace torchft_ext::nccl_host
