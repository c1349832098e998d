// For tests: the network breaks, no process does.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <vector>

#include "net/socket_address.h"

namespace torchft_ext {

// Shuts down every connection of this process to one of these addresses, whoever of it holds it;
// not those in private descriptor tables. The other ends see this side close.
inline void cutConnectionsTo(const std::vector<SocketAddress>& addresses) {
  constexpr int kHighest = 4096;
  for (int fd = 3; fd < kHighest; ++fd) {
    sockaddr_storage storage{};
    socklen_t length = sizeof storage;
    auto* raw = reinterpret_cast<sockaddr*>(&storage);
    if (::getpeername(fd, raw, &length) != 0) continue;
    const SocketAddress peer(raw, length);
    if (std::find(addresses.begin(), addresses.end(), peer) != addresses.end())
      ::shutdown(fd, SHUT_RDWR);
  }
}

}  // namespace torchft_ext
