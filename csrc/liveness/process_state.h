// What /proc says of a process of this host that does not answer. Any thread; reads two small
// files.
#pragma once

#include <cstdint>
#include <string>

namespace torchft_ext {

// "state T: stopped by a signal", "state D: ...", "it is dumping core"; empty for a state in which
// a process could answer, and where nothing can be read.
std::string describeProcessState(int64_t pid);

// The same, of what its "status" and "stat" hold; proc(5).
std::string describeProcessState(const std::string& status, const std::string& stat);

// The kernel's letter for this process's main thread, as proc(5) has it: 'R', 'S', 'D', ...; '?':
// it cannot be read.
char mainThreadStateLetter();

}  // namespace torchft_ext
