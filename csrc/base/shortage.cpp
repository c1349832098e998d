#include "base/shortage.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

namespace torchft_ext {
namespace {

constexpr rlim_t kMostLookedAt = 65536;  // of descriptors: a look costs 0.1 us or more

std::string limitText(rlim_t limit) {
  return limit == RLIM_INFINITY ? "none" : std::to_string(limit);
}

rlim_t softLimit(decltype(RLIMIT_NOFILE) of) {
  rlimit limit{};
  return ::getrlimit(of, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

// Without a descriptor: there is none to open a directory with.
std::string descriptors() {
  const rlim_t limit = softLimit(RLIMIT_NOFILE);
  rlim_t open = 0;
  for (rlim_t fd = 0; fd < std::min(limit, kMostLookedAt); ++fd)
    open += ::fcntl(static_cast<int>(fd), F_GETFD) >= 0 ? 1 : 0;
  return std::to_string(open) + " are open, the limit is " + limitText(limit) +
         ": raise it with ulimit -n";
}

std::string threads() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word && word != "Threads:") {
  }
  std::string running;
  if (!(status >> running)) running = "some";
  return running + " threads run in this process; the limit of its user's threads is " +
         limitText(softLimit(RLIMIT_NPROC)) +
         ", raise it with ulimit -u; a container may have one of its own, pids.max";
}

std::string ports() {
  std::ifstream range("/proc/sys/net/ipv4/ip_local_port_range");
  std::string first;
  std::string last;
  if (!(range >> first >> last)) return "no local port is left";
  return "no local port from " + first + " to " + last +
         " is left: widen net.ipv4.ip_local_port_range";
}

std::string numbers(int error) {
  switch (error) {
    case EMFILE:
      return descriptors();
    case EAGAIN:
      return threads();
    case EADDRNOTAVAIL:
      return ports();
    default:
      return {};
  }
}

}  // namespace

bool isShortage(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS ||
         error == ENOSPC || error == EADDRNOTAVAIL;
}

std::string shortageNumbers(int error) {
  const std::string found = numbers(error);
  return found.empty() ? "" : " (" + found + ")";
}

}  // namespace torchft_ext
