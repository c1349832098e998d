// A door for tests: the network breaks, no process does.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace torchft_ext {

// Shuts down every connection of this process to that port, whoever of it holds it; not those in
// private descriptor tables. The port's own ends of them see the other side close.
inline void cutConnectionsTo(int port) {
  constexpr int kHighest = 4096;
  for (int fd = 3; fd < kHighest; ++fd) {
    sockaddr_in peer{};
    socklen_t length = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
    if (peer.sin_family == AF_INET && ntohs(peer.sin_port) == port) ::shutdown(fd, SHUT_RDWR);
  }
}

}  // namespace torchft_ext
