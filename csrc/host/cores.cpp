#include "host/cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace torchft_ext {
namespace {

constexpr int kNoLimit = std::numeric_limits<int>::max();

std::string contentsOf(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Of one cgroup: "max 100000", or "150000 100000": of so many microseconds so many.
int coresOf(const std::string& cpu_max) {
  std::istringstream text(cpu_max);
  long quota = 0;
  long period = 0;
  if (!(text >> quota >> period) || quota <= 0 || period <= 0) return kNoLimit;
  return static_cast<int>(std::clamp<long>(quota / period, 1, kNoLimit));
}

int coresOfAffinity() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  return std::max(1, CPU_COUNT(&allowed));
}

}  // namespace

// Those above limit it too. In a container the path may be one that it does not see.
int coresOfCgroups(std::string_view of_process, const std::string& mounted) {
  constexpr std::string_view kVersion2 = "0::";
  const size_t begin = of_process.find(kVersion2);
  if (begin == std::string_view::npos) return 0;
  of_process.remove_prefix(begin + kVersion2.size());
  std::string path(of_process.substr(0, of_process.find('\n')));
  int least = kNoLimit;
  while (true) {
    least = std::min(least, coresOf(contentsOf(mounted + path + "/cpu.max")));
    if (path.empty()) break;
    path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
  }
  return least == kNoLimit ? 0 : least;
}

int usableCores() {
  const int allowed = coresOfAffinity();
  const int limit = coresOfCgroups(contentsOf("/proc/self/cgroup"), "/sys/fs/cgroup");
  return limit == 0 ? allowed : std::min(allowed, limit);
}

}  // namespace torchft_ext
