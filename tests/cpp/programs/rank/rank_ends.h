// The ways in which a rank of the failure matrix harms itself. Any thread.
#pragma once

#include <string>

namespace torchft_ext {

// _exit | exit (its handlers run) | exec | exception | abort (with a core, as
// large as the hard limit allows) | oom (takes memory until its cgroup's limit kills it).
[[noreturn]] void endProcess(const std::string& how);

// Makes so much memory resident, for good: what a core holds, and what the kernel frees first.
void takeMemory(size_t mebibytes);

}  // namespace torchft_ext
