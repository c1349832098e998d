// addressOfInterface() of net/socket_address.h.
#include <ifaddrs.h>
#include <net/if.h>

#include <array>
#include <memory>
#include <tuple>

#include "net/socket_address.h"

namespace torchft_ext {
namespace {

// How the user named the interfaces.
struct Choice {
  bool all_but = false;
  bool exact = false;
  std::vector<std::string_view> names;

  explicit Choice(std::string_view text) {
    all_but = takePrefix(&text, '^');
    exact = takePrefix(&text, '=');
    while (!text.empty()) {
      const size_t comma = text.find(',');
      if (const auto name = text.substr(0, comma); !name.empty()) names.push_back(name);
      text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
    }
  }

  // The lower, the earlier named; equal names before mere prefixes. nullopt: not wanted.
  std::optional<size_t> rank(std::string_view interface) const {
    std::optional<size_t> best;
    for (size_t i = 0; i < names.size() && !best; ++i) {
      if (interface == names[i]) {
        best = 2 * i;
      } else if (!exact && interface.substr(0, names[i].size()) == names[i]) {
        best = 2 * i + 1;
      }
    }
    if (!all_but) return best;
    return best ? std::nullopt : std::optional<size_t>(0);
  }

 private:
  static bool takePrefix(std::string_view* text, char prefix) {
    if (text->empty() || text->front() != prefix) return false;
    text->remove_prefix(1);
    return true;
  }
};

int addressClass(const SocketAddress& address) {
  if (address.family() == AF_INET) return 0;
  const auto* raw = reinterpret_cast<const sockaddr_in6*>(address.raw());
  return IN6_IS_ADDR_LINKLOCAL(&raw->sin6_addr) ? 2 : 1;
}

std::optional<SocketAddress> usableAddress(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr || (entry.ifa_flags & IFF_UP) == 0) return std::nullopt;
  switch (entry.ifa_addr->sa_family) {
    case AF_INET:
      return SocketAddress(entry.ifa_addr, sizeof(sockaddr_in));
    case AF_INET6:
      return SocketAddress(entry.ifa_addr, sizeof(sockaddr_in6));
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<SocketAddress> addressOfInterface(std::string_view names) {
  const Choice choice(names);
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return std::nullopt;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(all, ::freeifaddrs);

  using Score =
      std::tuple<bool, size_t, int>;  // the lowest wins; loopback only if nothing else is left
  std::optional<Score> best_score;
  std::optional<SocketAddress> best;
  for (const ifaddrs* entry = all; entry != nullptr; entry = entry->ifa_next) {
    const auto rank = choice.rank(entry->ifa_name);
    const auto address = usableAddress(*entry);
    if (!rank || !address) continue;
    const Score score{choice.all_but && address->isLoopback(), *rank, addressClass(*address)};
    if (best_score && *best_score <= score) continue;
    best_score = score;
    best = address;
  }
  return best;
}

}  // namespace torchft_ext
