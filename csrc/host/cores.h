// How many cores this process may use. Any thread; reads small files of the kernel's, and never
// waits for another process.
#pragma once

#include <string>
#include <string_view>

namespace torchft_ext {

// The smaller of what its affinity allows and of what its cgroups (version 2) allow; 1 at least. A
// part of a core does not count.
int usableCores();
// What cgroups allow: `of_process` is /proc/self/cgroup, `mounted` where they are mounted. 0: there
// is no limit.
int coresOfCgroups(std::string_view of_process, const std::string& mounted);

}  // namespace torchft_ext
