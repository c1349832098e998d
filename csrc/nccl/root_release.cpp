#include "nccl/root_release.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>

#include "base/deadline.h"
#include "base/unique_fd.h"

namespace torchft_ext {
namespace {

constexpr Duration kWithin = std::chrono::milliseconds(250);

// What a connection to it begins with, in this machine's byte order: who speaks, in what capacity,
// and the length of what is said.
constexpr int kBootstrap = 1;  // ncclSocketTypeBootstrap
constexpr int kUnknown = 0;
struct Greeting {
  uint64_t magic = 0;
  int capacity = kUnknown;
  int bytes = INT_MAX;
};
static_assert(sizeof(Greeting) == 16);

// An id is that magic number and the address of its listener.
struct Root {
  explicit Root(const NcclUniqueId& id) {
    static_assert(sizeof magic + sizeof address <= sizeof id.bytes);
    std::memcpy(&magic, id.bytes.data(), sizeof magic);
    std::memcpy(&address, id.bytes.data() + sizeof magic, sizeof address);
  }
  socklen_t addressBytes() const {
    switch (address.sin6_family) {
      case AF_INET:
        return sizeof(sockaddr_in);
      case AF_INET6:
        return sizeof(sockaddr_in6);
      default:
        return 0;
    }
  }
  uint64_t magic = 0;
  sockaddr_in6 address{};
};

bool awaits(int socket, short what, Deadline deadline) {
  pollfd entry{socket, what, 0};
  return ::poll(&entry, 1, static_cast<int>(toMilliseconds(deadline.remaining())) + 1) == 1;
}

// Until the other end has closed the connection, or the deadline has passed.
void greet(const Root& root, int capacity) {
  const Deadline deadline = Deadline::after(kWithin);
  const UniqueFd socket(
      ::socket(root.address.sin6_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.get() < 0) return;
  const auto* const address = reinterpret_cast<const sockaddr*>(&root.address);
  if (::connect(socket.get(), address, root.addressBytes()) != 0 && errno != EINPROGRESS) return;
  if (!awaits(socket.get(), POLLOUT, deadline)) return;
  const Greeting greeting{root.magic, capacity};
  if (::send(socket.get(), &greeting, sizeof greeting, MSG_NOSIGNAL) != sizeof greeting) return;
  ::shutdown(socket.get(), SHUT_WR);
  char byte = 0;
  while (awaits(socket.get(), POLLIN, deadline))
    if (::recv(socket.get(), &byte, 1, 0) <= 0) return;
}

}  // namespace

// A root gives up over a connection in another capacity than its own and closes everything (2.18 to
// 2.28, run); later ones take the next connection instead, and give up over a message that is
// longer than any of theirs, which leaves its connection's descriptor open (2.30, 2.32, run).
void releaseNcclRoot(const NcclUniqueId& id) {
  const Root root(id);
  if (root.addressBytes() == 0) return;
  greet(root, kUnknown);
  greet(root, kBootstrap);
}

}  // namespace torchft_ext
