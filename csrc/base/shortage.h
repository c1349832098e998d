// What a process runs out of (descriptors, threads, memory, ports), as the kernel's errno says it,
// and in words with numbers: what is in use, the limit, how to raise it. Any thread.
#pragma once

#include <chrono>
#include <string>

namespace torchft_ext {

// How long something may lack before an attempt fails for it: what ends elsewhere in the process,
// the last generation's connections among it, gives it back within a second.
inline constexpr std::chrono::milliseconds kLacksFor{1000};

// Whether socket(2), accept(2), epoll_ctl(2) or connect(2) to a TCP address says with it that this
// process or its host has none left, and nothing of a peer.
bool isShortage(int error);

// " (128 are open, the limit is 128: raise it with ulimit -n)", or of threads, or of ports, or of
// address space where that is what a thread lacks. Empty where there is nothing to be said of it.
std::string shortageNumbers(int error);

}  // namespace torchft_ext
