#include "base/shortage.h"

#include <sys/resource.h>

#include <cerrno>
#include <fstream>

namespace torchft_ext {
namespace {

std::string limitText(rlim_t limit) {
  return limit == RLIM_INFINITY ? "none" : std::to_string(limit);
}

rlim_t softLimit(decltype(RLIMIT_NOFILE) of) {
  rlimit limit{};
  return ::getrlimit(of, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

// The kernel gives the lowest free number below the limit: all of these are in use.
std::string descriptors() {
  const std::string limit = limitText(softLimit(RLIMIT_NOFILE));
  return limit + " are open, the limit is " + limit + ": raise it with ulimit -n";
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
