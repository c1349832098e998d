#include "paired_sockets.h"

#include <sys/eventfd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <deque>

namespace torchft_ext {
namespace fuzz {
namespace {

std::vector<Dialled> dialled;
std::deque<UniqueFd> arrivals;
int acceptor = -1;

}  // namespace

Pair::Pair() {
  std::array<int, 2> ends{};
  const int type = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
  if (::socketpair(AF_UNIX, type, 0, ends.data()) != 0) std::abort();
  near = UniqueFd(ends[0]);
  far = UniqueFd(ends[1]);
}

std::vector<Dialled> takeDialled() {
  return std::exchange(dialled, {});
}

UniqueFd arriveAtAcceptor() {
  Pair pair;
  arrivals.push_back(std::move(pair.near));
  ::eventfd_write(acceptor, 1);
  return std::move(pair.far);
}

void forgetArrivals() {
  arrivals.clear();
}

}  // namespace fuzz

std::optional<ListeningSocket> listenOn(const SocketAddress& address, PortRange /*ports*/,
                                        std::string* /*error*/) {
  ListeningSocket made{UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), address};
  fuzz::acceptor = made.fd.get();
  return made;
}

UniqueFd acceptOne(int listener_fd) {
  if (fuzz::arrivals.empty()) {
    eventfd_t count = 0;
    ::eventfd_read(listener_fd, &count);
    errno = EAGAIN;
    return {};
  }
  UniqueFd next = std::move(fuzz::arrivals.front());
  fuzz::arrivals.pop_front();
  return next;
}

UniqueFd startConnect(const SocketAddress& to, std::string* /*error*/, int* /*code*/) {
  fuzz::Pair pair;
  fuzz::dialled.push_back({std::move(pair.far), to});
  return std::move(pair.near);
}

int pendingSocketError(int fd) {
  int error = 0;
  socklen_t length = sizeof(error);
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

bool peersKernelHasAll(int /*fd*/) {
  return true;
}

// The ends of a pair have no addresses.
std::optional<SocketAddress> localAddressOfSocket(int /*fd*/) {
  return std::nullopt;
}

}  // namespace torchft_ext
