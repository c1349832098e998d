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

}  // namespace torchft_ext
