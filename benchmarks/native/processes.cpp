#include "processes.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <system_error>
#include <utility>
#include <vector>

namespace torchft_ext::bench {
namespace {

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// Between fork and exec: only what signal handlers may call.
[[noreturn]] void become(const std::vector<char*>& argv, int output) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (output >= 0) ::dup2(output, STDOUT_FILENO);
  ::execv("/proc/self/exe", argv.data());
  ::_exit(127);
}

}  // namespace

Process::Process(const Arguments& arguments, bool told) {
  std::vector<std::string> words = wordsOf(arguments);
  words.insert(words.begin(), "ft_bench");
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int ends[2] = {-1, -1};
  if (told && ::pipe2(ends, O_CLOEXEC) != 0) fail("pipe2");
  pid_ = ::fork();
  if (pid_ == 0) become(argv, ends[1]);
  if (told) ::close(ends[1]);
  output_ = ends[0];
  if (pid_ < 0) {
    if (told) ::close(output_);
    fail("fork");
  }
}

Process::~Process() {
  if (pid_ > 0) {
    kill();
    wait();
  }
  if (output_ >= 0) ::close(output_);
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), output_(std::exchange(other.output_, -1)) {}

void Process::kill() const {
  ::kill(pid_, SIGKILL);
}

bool Process::wait() {
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) continue;
  pid_ = -1;
  return status == 0;
}

std::string Process::readLine() {
  std::string line;
  char byte = 0;
  while (::read(output_, &byte, 1) == 1 && byte != '\n') line += byte;
  return line;
}

}  // namespace torchft_ext::bench
