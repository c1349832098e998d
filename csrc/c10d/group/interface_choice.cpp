#include "c10d/group/interface_choice.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>

#include "base/log.h"
#include "c10d/group/name_lookup.h"
#include "c10d/store/store_adapter.h"

namespace torchft_ext {
namespace {

SocketAddress namedInterface(const std::string& source, const std::string& names) {
  if (const auto numeric = SocketAddress::fromNumeric(names, 0)) return *numeric;
  const std::optional<SocketAddress> found = addressOfInterface(names);
  TORCH_CHECK_VALUE(found.has_value(), source,
                    ": expected the name of an interface that is up and has an address, found '",
                    names, "'");
  return *found;
}

// Two questions to a name server, as resolvers usually wait for an answer.
constexpr Duration kResolverAnswersWithin = std::chrono::seconds(10);

// The first address of that name that is not loopback and that this host can bind to.
std::optional<SocketAddress> ownAddressNamed(const std::string& name) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (::getaddrinfo(name.c_str(), nullptr, &hints, &list) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    const SocketAddress address(entry->ai_addr, entry->ai_addrlen);
    std::string error;
    if (!address.isLoopback() && listenOn(address, PortRange{}, &error)) return address;
  }
  return std::nullopt;
}

std::optional<SocketAddress> addressOfHostName(Duration limit) {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return std::nullopt;
  const std::string own = name.data();
  return lookUp("this host's name, '" + own + "',", limit, [own] { return ownAddressNamed(own); });
}

std::optional<SocketAddress> towards(const HostAndPort& server, Duration limit) {
  const auto look = [server] { return localAddressTowards(server.host, server.port); };
  if (SocketAddress::fromNumeric(server.host, server.port)) return look();  // nobody is asked
  return lookUp("the store's host, '" + server.host + "',", limit, look);
}

}  // namespace

SocketAddress chooseAddress(const FtOptions& options, const Environment& environment,
                            const c10::intrusive_ptr<c10d::Store>& store) {
  StoreAddress server;
  const bool known = store && serverAddress(store, &server);
  return chooseAddressTowards(options, environment,
                              known ? std::optional<HostAndPort>(server) : std::nullopt);
}

SocketAddress chooseAddressTowards(const FtOptions& options, const Environment& environment,
                                   const std::optional<HostAndPort>& server) {
  if (options.interface) return namedInterface("Options.interface", *options.interface);
  if (environment.interface)
    return namedInterface(*environment.interface_variable, *environment.interface);
  const Deadline deadline =
      Deadline::after(std::min(durationOf(options.timeout), kResolverAnswersWithin));
  if (server) {
    if (const auto address = towards(*server, deadline.remaining())) return *address;
  }
  if (const auto address = addressOfHostName(deadline.remaining())) return *address;
  log(LogLevel::kInfo,
      "no address towards the store and none of this host's name: using 127.0.0.1, which serves "
      "one host only; name an "
      "interface with Options(interface=...) or TORCHFT_EXT_SOCKET_IFNAME");
  return SocketAddress::fromNumeric("127.0.0.1", 0).value();
}

std::string interfaceOf(const SocketAddress& address) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (SocketAddress(entry->ifa_addr, length).ip() == address.ip()) return entry->ifa_name;
  }
  return {};
}

std::optional<SocketAddress> resolveAddress(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list) != 0) {
    return std::nullopt;
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  return SocketAddress(list->ai_addr, list->ai_addrlen);
}

}  // namespace torchft_ext
