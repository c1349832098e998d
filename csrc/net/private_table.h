// A descriptor table that one thread has to itself. The kernel closes it when that thread ends,
// before it frees the memory of a killed process.
#pragma once

#include <sys/types.h>

#include <vector>

namespace torchft_ext {

// Gives the calling thread a table of its own with 0, 1, 2 and `keep`. False: the kernel offers no
// way (or ThreadSanitizer forbids it), the table is still the shared one and untouched.
bool takePrivateTable(int keep);

// The kernel's ids of this process's threads that have one and still run. Any thread.
std::vector<pid_t> threadsWithPrivateTables();

}  // namespace torchft_ext
