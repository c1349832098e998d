#include "base/shortage.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

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

constexpr rlim_t kMiB = rlim_t{1} << 20U;

// How much address space a new thread's stack takes, and this process has. 0: not known.
rlim_t stackOfThread() {
  pthread_attr_t attributes;
  if (::pthread_getattr_default_np(&attributes) != 0) return 0;
  size_t stack = 0;
  ::pthread_attr_getstacksize(&attributes, &stack);
  ::pthread_attr_destroy(&attributes);
  return stack;
}

rlim_t addressSpace() {
  std::ifstream statm("/proc/self/statm");
  rlim_t pages = 0;
  return statm >> pages ? pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) : 0;
}

// Empty: it is not the limit on address space that keeps a thread's stack out.
std::string stackSpace() {
  const rlim_t limit = softLimit(RLIMIT_AS);
  const rlim_t stack = stackOfThread();
  const rlim_t used = addressSpace();
  if (limit == RLIM_INFINITY || used + stack <= limit) return {};
  return "a thread's stack takes " + std::to_string(stack / kMiB) + " MiB of address space, " +
         std::to_string(used / kMiB) + " MiB are in use, the limit is " +
         std::to_string(limit / kMiB) +
         " MiB: raise it with ulimit -v, or make stacks smaller with ulimit -s";
}

std::string threads() {
  if (std::string stack = stackSpace(); !stack.empty()) return stack;
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
