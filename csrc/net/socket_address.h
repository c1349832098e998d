// Addresses, interfaces and sockets: TCP over IPv4 and IPv6, and abstract Unix sockets of ours
// ("local", see net/local_address.h). All sockets made here are non-blocking and close-on-exec, and
// TCP ones have TCP_NODELAY. Functions return an error text instead of throwing where a peer or the
// network decides; they throw std::system_error only when the kernel refuses a resource.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"

namespace torchft_ext {

class SocketAddress {
 public:
  SocketAddress();
  SocketAddress(const sockaddr* address, socklen_t length);

  // Numeric IPv4 or IPv6 (with or without brackets and %scope); no name is looked up.
  static std::optional<SocketAddress> fromNumeric(std::string_view ip, uint16_t port);
  // An abstract Unix socket. The name is of letters, digits and dashes; what goes before it in the
  // kernel's name is ours, so that no peer makes us connect to another program's socket.
  static std::optional<SocketAddress> fromLocalName(std::string_view name);
  // "10.0.0.1:80", "[fe80::1%eth0]:80", "unix:name"
  static std::optional<SocketAddress> parse(std::string_view text);
  std::string toString() const;   // the inverse of parse()
  std::string ip() const;         // without port and brackets; "" if local
  std::string localName() const;  // "" unless local

  uint16_t port() const;
  void setPort(uint16_t port);
  int family() const { return storage_.ss_family; }
  bool isLocal() const;
  bool isLoopback() const;
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t rawLength() const;

  friend bool operator==(const SocketAddress& a, const SocketAddress& b) {
    return a.toString() == b.toString();
  }

 private:
  sockaddr_storage storage_;
};

// "7000-7100", "7000", "" or "0" (any free port). nullopt if malformed or reversed.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;
  static std::optional<PortRange> parse(std::string_view text);
  std::string toString() const;  // "ports 7000 to 7100", "port 7000", "any port"
};

// The first usable address of an interface named like torch's users name it: "eth0", "eth" as a
// prefix, a list "eth0,ib0", "=eth0" exact, "^docker,lo" all but. IPv4 before IPv6, link-local
// last.
std::optional<SocketAddress> addressOfInterface(std::string_view names);
// The local address from which the kernel would reach host:port (UDP connect, nothing is sent).
// Resolves the name; nullopt if it does not resolve or is unreachable.
std::optional<SocketAddress> localAddressTowards(const std::string& host, uint16_t port);
std::optional<SocketAddress> localAddressOfSocket(int fd);

struct ListeningSocket {
  UniqueFd fd;
  SocketAddress address;  // with the port the kernel gave
};
// Binds to the address's ip and the first free port of the range, or to its local name. error is
// set on failure.
std::optional<ListeningSocket> listenOn(const SocketAddress& address, PortRange ports,
                                        std::string* error);
UniqueFd acceptOne(int listener_fd);  // invalid: nothing to accept
// Completes with EPOLLOUT. Invalid where it cannot even begin: error says why, and code is the
// system's number where the system refused.
UniqueFd startConnect(const SocketAddress& to, std::string* error, int* code = nullptr);
int pendingSocketError(int fd);  // SO_ERROR
// Whether the kernel at the other end has taken all that was sent; of a Unix socket: sent means so.
bool peersKernelHasAll(int fd);

}  // namespace torchft_ext
