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

// Of this process's main thread, as proc(5) has it.
struct ThreadSample {
  char letter = '?';   // 'R', 'S', 'D', ...; '?': it cannot be read
  uint64_t turns = 0;  // how often it has been given a core; 0: the kernel does not count
};
ThreadSample sampleMainThread();

}  // namespace torchft_ext
