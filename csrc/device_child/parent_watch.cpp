#include "device_child/parent_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <memory>
#include <system_error>
#include <utility>

#include "child/channel.h"

namespace torchft_ext::device_child {
namespace {

constexpr milliseconds kEndLimit{200};

// The process ends as its parent would end it: whatever a library has running.
void watch(int socket, int process, int stop) {
  std::array<pollfd, 3> ends{pollfd{stop, POLLIN, 0}, pollfd{socket, POLLRDHUP, 0},
                             pollfd{process, POLLIN, 0}};
  while (::poll(ends.data(), ends.size(), -1) < 0)
    if (errno != EINTR) return;
  if (ends[0].revents == 0) ::kill(::getpid(), SIGKILL);
}

}  // namespace

ParentWatch::ParentWatch(int socket, pid_t parent) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0)
    throw std::system_error(errno, std::generic_category(), "no descriptor to watch the parent");
  stop_ = UniqueFd(ends[1]);
  const auto stopped = std::make_shared<UniqueFd>(ends[0]);
  const auto process = std::make_shared<UniqueFd>(child::processDescriptor(parent));
  thread_ = OwnedThread(
      "ft-parent", [socket, stopped, process] { watch(socket, process->get(), stopped->get()); });
}

ParentWatch::~ParentWatch() {
  stop_.reset();
  if (!thread_.join(Deadline::after(kEndLimit))) thread_.abandon("its process ends");
}

}  // namespace torchft_ext::device_child
