// What a program on the core library alone needs to begin.
#pragma once

#include "member.h"
#include "report.h"

namespace torchft_ext::bench {

// Processes that form a world of one and do one allreduce: from their start to the sum. The row's
// more: the most memory that one ever had, in MiB. On rank 0; the others get an empty row.
Row measureStartup(const Member& member);
// Such a process: it prints when it had the sum, in nanoseconds, and its VmHWM in KiB.
void beAlone();

}  // namespace torchft_ext::bench
