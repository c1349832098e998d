// What generations cost: beginning one, aborting one, and hearing of a death in one.
//
// Every rank calls the same functions in the same order.
#pragma once

#include <vector>

#include "member.h"
#include "report.h"

namespace torchft_ext::bench {

// Members, ranks and sizes stay; the whole of configure() is timed.
Row measureConfigure(const Member& member);
// Rank 0 aborts while all wait: until its own call has returned and its waiter is released.
Row measureAbort(const Member& member);
// A member is killed while all others wait for it: from SIGKILL until a survivor's waiter is
// released. Two rows: "death", of every survivor; "death_last", of the last one each time. The
// victim takes the last rank's place, in a process of its own for each round. World: at least 2.
std::vector<Row> measureDeath(const Member& member);
// The victim's own part: the generation's last rank, until it is killed.
void beVictim(const Arguments& arguments, Comm& comm, const std::shared_ptr<Store>& store);

}  // namespace torchft_ext::bench
