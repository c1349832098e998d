#include "c10d/interface_choice.h"

#include <netdb.h>
#include <unistd.h>

#include <array>
#include <memory>

#include "base/log.h"
#include "c10d/store_adapter.h"

namespace torchft_ext {
namespace {

SocketAddress namedInterface(const std::string& source, const std::string& names) {
  const std::optional<SocketAddress> found = addressOfInterface(names);
  TORCH_CHECK_VALUE(found.has_value(), source,
                    ": expected the name of an interface that is up and has an address, found '",
                    names, "'");
  return *found;
}

// The first address of this host's name that is not loopback and that this host can bind to.
std::optional<SocketAddress> addressOfHostName() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return std::nullopt;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (::getaddrinfo(name.data(), nullptr, &hints, &list) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    const SocketAddress address(entry->ai_addr, entry->ai_addrlen);
    std::string error;
    if (!address.isLoopback() && listenOn(address, PortRange{}, &error)) return address;
  }
  return std::nullopt;
}

std::optional<SocketAddress> towardsStore(const c10::intrusive_ptr<c10d::Store>& store) {
  StoreAddress server;
  if (!store || !serverAddress(store, &server)) return std::nullopt;
  return localAddressTowards(server.host, server.port);
}

}  // namespace

SocketAddress chooseAddress(const FtOptions& options, const Environment& environment,
                            const c10::intrusive_ptr<c10d::Store>& store) {
  if (options.interface) return namedInterface("Options.interface", *options.interface);
  if (environment.interface)
    return namedInterface(*environment.interface_variable, *environment.interface);
  if (const auto address = towardsStore(store)) return *address;
  if (const auto address = addressOfHostName()) return *address;
  log(LogLevel::kInfo,
      "no address towards the store and none of this host's name: using 127.0.0.1, which serves "
      "one host only; name an "
      "interface with Options(interface=...) or TORCHFT_EXT_SOCKET_IFNAME");
  return SocketAddress::fromNumeric("127.0.0.1", 0).value();
}

}  // namespace torchft_ext
