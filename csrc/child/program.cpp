#include "child/program.h"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "base/unique_fd.h"
#include "child/server.h"

namespace torchft_ext::child {
namespace {

bool startedByAGroup(const Program& program, int argc) {
  if (argc != 2) return false;
  for (int fd = kSocket; fd <= program.last_descriptor; ++fd)
    if (::fcntl(fd, F_GETFD) < 0) return false;
  return true;
}

}  // namespace

int run(const Program& program, int argc, char** argv) {
  if (!startedByAGroup(program, argc)) {
    std::fprintf(stderr, "%s: started by torchft_ext.process_group alone\n", program.name);
    return 2;
  }
  // What the parent has left open for whoever comes.
  ::close_range(static_cast<unsigned>(program.last_descriptor) + 1, ~0U, 0);
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  const auto parent = static_cast<pid_t>(std::strtol(argv[1], nullptr, 10));
  // kSocket itself stays open until the process has ended, which tells the parent of it.
  const auto channel = std::make_shared<Channel>(UniqueFd(::dup(kSocket)), parent);
  int status = 0;
  try {
    const auto engine = program.engine(parent);
    Server(channel, *engine).serve();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program.name, error.what());
    status = 3;
  }
  return status;  // the library's end, within a second, is exit()'s
}

}  // namespace torchft_ext::child
