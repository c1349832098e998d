#include "cpp/programs/rank/rank_ends.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>

namespace torchft_ext {
namespace {

constexpr size_t kMebibyte = size_t{1} << 20;
constexpr size_t kPage = 4096;

// A core is written only up to the soft limit, which most systems set to 0.
void allowCore() {
  rlimit limit{};
  ::getrlimit(RLIMIT_CORE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_CORE, &limit);
}

}  // namespace

void takeMemory(size_t mebibytes) {
  void* memory = ::mmap(nullptr, mebibytes * kMebibyte, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory");
  auto* bytes = static_cast<char*>(memory);
  for (size_t at = 0; at < mebibytes * kMebibyte; at += kPage) bytes[at] = 1;
}

void endProcess(const std::string& how) {
  if (how == "abort") {
    allowCore();
    std::abort();
  }
  if (how == "exec") ::execl("/bin/sleep", "sleep", "30", static_cast<char*>(nullptr));
  if (how == "exception") throw std::runtime_error("an exception that nobody catches");
  if (how == "exit") std::exit(3);
  while (how == "oom") takeMemory(1);
  ::_exit(7);
}

}  // namespace torchft_ext
