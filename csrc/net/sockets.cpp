// Sockets of net/socket_address.h: making them, and asking the kernel about them.
#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>

#include <cerrno>
#include <memory>
#include <system_error>

#include "base/shortage.h"
#include "net/socket_address.h"

namespace torchft_ext {
namespace {

constexpr int kBacklog = 4096;

std::string errorText(int error) {
  return std::error_code(error, std::generic_category()).message();
}

void explain(std::string* error, const std::string& text) {
  if (error != nullptr) *error = text;
}

UniqueFd makeSocket(int family, int type) {
  UniqueFd fd(::socket(family, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) {
    const int error = errno;
    throw std::system_error(error, std::generic_category(), "socket" + shortageNumbers(error));
  }
  return fd;
}

void setOption(int fd, int level, int option, int value) {
  ::setsockopt(fd, level, option, &value, sizeof(value));
}

// 0, or the error of the step that failed.
int tryListen(const SocketAddress& address, ListeningSocket* made) {
  made->fd = makeSocket(address.family(), SOCK_STREAM);
  const int fd = made->fd.get();
  setOption(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  if (::bind(fd, address.raw(), address.rawLength()) != 0) return errno;
  if (::listen(fd, kBacklog) != 0) return errno;
  const auto bound = localAddressOfSocket(fd);
  if (!bound) return errno;
  made->address = *bound;
  return 0;
}

}  // namespace

std::optional<SocketAddress> localAddressOfSocket(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  auto* raw = reinterpret_cast<sockaddr*>(&storage);
  if (::getsockname(fd, raw, &length) != 0) return std::nullopt;
  return SocketAddress(raw, length);
}

std::optional<SocketAddress> localAddressTowards(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
    return std::nullopt;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET && entry->ai_family != AF_INET6) continue;
    const UniqueFd fd(::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!fd || ::connect(fd.get(), entry->ai_addr, entry->ai_addrlen) != 0) continue;
    auto local = localAddressOfSocket(fd.get());
    if (!local) continue;
    local->setPort(0);
    return local;
  }
  return std::nullopt;
}

std::optional<ListeningSocket> listenOn(const SocketAddress& address, PortRange ports,
                                        std::string* error) {
  SocketAddress wanted = address;
  int last_error = EADDRINUSE;
  for (uint32_t port = ports.first; port <= ports.last; ++port) {
    wanted.setPort(static_cast<uint16_t>(port));
    ListeningSocket made;
    last_error = tryListen(wanted, &made);
    if (last_error == 0) return made;
    if (last_error != EADDRINUSE && last_error != EACCES) break;
  }
  const std::string where =
      address.isLocal() ? address.toString() : address.ip() + ", " + ports.toString();
  explain(error, "cannot listen on " + where + ": " + errorText(last_error));
  return std::nullopt;
}

UniqueFd acceptOne(int listener_fd) {
  for (int attempt = 0; attempt < 8; ++attempt) {
    UniqueFd fd(::accept4(listener_fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      setOption(fd.get(), IPPROTO_TCP, TCP_NODELAY, 1);  // a local socket has none, and says so
      return fd;
    }
    if (errno != EINTR && errno != ECONNABORTED) break;
  }
  return {};
}

UniqueFd startConnect(const SocketAddress& to, std::string* error, int* code) {
  if (to.family() != AF_INET && to.family() != AF_INET6 && !to.isLocal()) {
    explain(error, "cannot connect: the address is empty");
    return {};
  }
  UniqueFd fd = makeSocket(to.family(), SOCK_STREAM);
  if (!to.isLocal()) setOption(fd.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  if (::connect(fd.get(), to.raw(), to.rawLength()) == 0) return fd;
  const int refused = errno;
  if (refused == EINPROGRESS || refused == EINTR) return fd;
  // Of IPv6 it may mean as well that this host has none.
  const bool no_such_address = refused == EADDRNOTAVAIL && to.family() == AF_INET6;
  const std::string numbers =
      isShortage(refused) && !no_such_address ? shortageNumbers(refused) : "";
  explain(error, "cannot connect to " + to.toString() + ": " + errorText(refused) + numbers);
  if (code != nullptr) *code = no_such_address ? EHOSTUNREACH : refused;
  return {};
}

int pendingSocketError(int fd) {
  int error = 0;
  socklen_t length = sizeof(error);
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

bool peersKernelHasAll(int fd) {
  int domain = AF_UNIX;
  socklen_t length = sizeof(domain);
  if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) != 0 || domain == AF_UNIX)
    return true;
  int unacknowledged = 0;
  return ::ioctl(fd, SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0;
}

}  // namespace torchft_ext
