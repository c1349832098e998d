// The child process of a ProcessGroupBabyHost: the CPU engine, beside a program that may kill it.
//
//   torchft_ext_host_child PARENT
//
// Descriptor 3 is the socket to the parent, whose process id is PARENT; 4 is the shared memory.
// Exit status: 0 after a goodbye, or without a parent; 2: started otherwise; 3: what the parent
// sent makes no sense. Why is on stderr.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>

#include "base/unique_fd.h"
#include "child/server.h"

namespace {

constexpr int kSocket = 3;
constexpr int kArena = 4;

using namespace torchft_ext;

void serve(const std::shared_ptr<child::Channel>& channel) {
  const child::Arena arena(kArena);
  ::close(kArena);
  child::Server(channel, arena).serve();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || ::fcntl(kSocket, F_GETFD) < 0 || ::fcntl(kArena, F_GETFD) < 0) {
    std::fputs("torchft_ext_host_child: started by torchft_ext.process_group alone\n", stderr);
    return 2;
  }
  ::close_range(kArena + 1, ~0U, 0);  // what the parent has left open for whoever comes
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  const auto parent = static_cast<pid_t>(std::strtol(argv[1], nullptr, 10));
  // kSocket itself stays open until the process has ended, which tells the parent of it.
  const auto channel = std::make_shared<child::Channel>(UniqueFd(::dup(kSocket)), parent);
  int status = 0;
  try {
    serve(channel);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "torchft_ext_host_child: %s\n", error.what());
    status = 3;
  }
  return status;  // the library's end, within a second, is exit()'s
}
