// A descriptor table that one thread has to itself. The kernel closes it when that thread ends,
// before it frees the memory of a killed process.
#pragma once

namespace torchft_ext {

// Gives the calling thread a table of its own with 0, 1, 2 and `keep`. False: the kernel offers no
// way (or ThreadSanitizer forbids it), the table is still the shared one and untouched.
bool takePrivateTable(int keep);

}  // namespace torchft_ext
