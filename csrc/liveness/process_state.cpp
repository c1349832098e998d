#include "liveness/process_state.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>

#include "base/unique_fd.h"

namespace torchft_ext {
namespace {

std::string readProcFile(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return {};
  std::array<char, 4096> bytes;
  const ssize_t got = ::read(fd.get(), bytes.data(), bytes.size());
  return got > 0 ? std::string(bytes.data(), static_cast<size_t>(got)) : std::string();
}

// The state follows the command's name, which stands in parentheses and may hold any byte.
char stateLetter(const std::string& stat) {
  const size_t end_of_name = stat.rfind(')');
  if (end_of_name == std::string::npos || end_of_name + 2 >= stat.size()) return '?';
  return stat[end_of_name + 2];
}

}  // namespace

std::string describeProcessState(int64_t pid) {
  if (pid <= 0) return {};
  const std::string directory = "/proc/" + std::to_string(pid) + "/";
  return describeProcessState(readProcFile(directory + "status"), readProcFile(directory + "stat"));
}

std::string describeProcessState(const std::string& status, const std::string& stat) {
  if (status.find("CoreDumping:\t1") != std::string::npos) return "it is dumping core";
  switch (stateLetter(stat)) {
    case 'T':
      return "state T: stopped by a signal";
    case 't':
      return "state t: stopped by a debugger";
    case 'D':
      return "state D: in uninterruptible sleep";
    case 'Z':
      return "state Z: its main thread has ended";
    default:
      return {};
  }
}

ThreadSample sampleMainThread() {
  const std::string directory = "/proc/self/task/" + std::to_string(::getpid()) + "/";
  ThreadSample sample;
  sample.letter = stateLetter(readProcFile(directory + "stat"));
  const std::string times = readProcFile(directory + "schedstat");  // of it the third number
  const size_t before = times.rfind(' ');
  if (before != std::string::npos) sample.turns = std::strtoull(&times[before], nullptr, 10);
  return sample;
}

}  // namespace torchft_ext
