#include "net/socket_address.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstring>

namespace torchft_ext {
namespace {

constexpr std::string_view kLocalScheme = "unix:";
constexpr std::string_view kLocalPrefix = "torchft_ext-";  // in the kernel's name
constexpr size_t kLongestLocalName = 64;

template <typename Integer>
bool parseWhole(std::string_view text, Integer* value) {
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const auto [stopped, error] = std::from_chars(begin, end, *value);
  return !text.empty() && error == std::errc() && stopped == end;
}

const sockaddr_in& asV4(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_in&>(storage);
}
const sockaddr_in6& asV6(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_in6&>(storage);
}

const sockaddr_un& asUnix(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr_un&>(storage);
}

bool isNameLetter(char letter) {
  return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
         (letter >= '0' && letter <= '9') || letter == '-';
}

std::optional<uint32_t> parseScope(const std::string& scope) {
  uint32_t index = 0;
  if (parseWhole(std::string_view(scope), &index)) return index;
  index = ::if_nametoindex(scope.c_str());
  return index == 0 ? std::nullopt : std::optional<uint32_t>(index);
}

std::string scopeText(uint32_t index) {
  std::array<char, IF_NAMESIZE> name{};
  if (::if_indextoname(index, name.data()) != nullptr) return name.data();
  return std::to_string(index);
}

std::optional<SocketAddress> parseV4(const std::string& ip, uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  if (::inet_pton(AF_INET, ip.c_str(), &address.sin_addr) != 1) return std::nullopt;
  return SocketAddress(reinterpret_cast<const sockaddr*>(&address), sizeof(address));
}

std::optional<SocketAddress> parseV6(std::string ip, uint16_t port) {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = htons(port);
  if (const size_t percent = ip.find('%'); percent != std::string::npos) {
    const auto scope = parseScope(ip.substr(percent + 1));
    if (!scope) return std::nullopt;
    address.sin6_scope_id = *scope;
    ip.resize(percent);
  }
  if (::inet_pton(AF_INET6, ip.c_str(), &address.sin6_addr) != 1) return std::nullopt;
  return SocketAddress(reinterpret_cast<const sockaddr*>(&address), sizeof(address));
}

}  // namespace

SocketAddress::SocketAddress() : storage_{} {}

SocketAddress::SocketAddress(const sockaddr* address, socklen_t length) : storage_{} {
  std::memcpy(&storage_, address, std::min<size_t>(length, sizeof(storage_)));
}

std::optional<SocketAddress> SocketAddress::fromNumeric(std::string_view ip, uint16_t port) {
  if (ip.size() >= 2 && ip.front() == '[' && ip.back() == ']') {
    ip = ip.substr(1, ip.size() - 2);
    if (ip.find(':') == std::string_view::npos) return std::nullopt;
  }
  if (ip.find('\0') != std::string_view::npos) return std::nullopt;
  const std::string text(ip);
  return ip.find(':') == std::string_view::npos ? parseV4(text, port) : parseV6(text, port);
}

std::optional<SocketAddress> SocketAddress::fromLocalName(std::string_view name) {
  const bool good = !name.empty() && name.size() <= kLongestLocalName &&
                    std::all_of(name.begin(), name.end(), isNameLetter);
  if (!good) return std::nullopt;
  sockaddr_un address{};  // an abstract name begins with a zero
  address.sun_family = AF_UNIX;
  const std::string whole = std::string(kLocalPrefix).append(name);
  std::memcpy(address.sun_path + 1, whole.data(), whole.size());
  return SocketAddress(reinterpret_cast<const sockaddr*>(&address), sizeof(address));
}

std::optional<SocketAddress> SocketAddress::parse(std::string_view text) {
  if (text.substr(0, kLocalScheme.size()) == kLocalScheme)
    return fromLocalName(text.substr(kLocalScheme.size()));
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::string_view ip = text.substr(0, colon);
  const bool bracketed = !ip.empty() && ip.front() == '[';
  if (!bracketed && ip.find(':') != std::string_view::npos) return std::nullopt;
  uint16_t port = 0;
  if (!parseWhole(text.substr(colon + 1), &port)) return std::nullopt;
  return fromNumeric(ip, port);
}

std::string SocketAddress::ip() const {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (family() == AF_INET) {
    ::inet_ntop(AF_INET, &asV4(storage_).sin_addr, text.data(), text.size());
    return text.data();
  }
  if (family() != AF_INET6) return "";
  ::inet_ntop(AF_INET6, &asV6(storage_).sin6_addr, text.data(), text.size());
  const uint32_t scope = asV6(storage_).sin6_scope_id;
  return scope == 0 ? std::string(text.data()) : text.data() + ("%" + scopeText(scope));
}

bool SocketAddress::isLocal() const {
  return family() == AF_UNIX;
}

// Of a socket that has no name, or not one of ours: "".
std::string SocketAddress::localName() const {
  if (!isLocal()) return "";
  const char* const name = asUnix(storage_).sun_path + 1;
  const std::string_view whole(name, ::strnlen(name, sizeof(sockaddr_un::sun_path) - 1));
  if (whole.substr(0, kLocalPrefix.size()) != kLocalPrefix) return "";
  return std::string(whole.substr(kLocalPrefix.size()));
}

std::string SocketAddress::toString() const {
  if (isLocal()) return std::string(kLocalScheme) + localName();
  if (family() == AF_INET) return ip() + ":" + std::to_string(port());
  if (family() == AF_INET6) return "[" + ip() + "]:" + std::to_string(port());
  return "";
}

uint16_t SocketAddress::port() const {
  if (family() == AF_INET) return ntohs(asV4(storage_).sin_port);
  if (family() == AF_INET6) return ntohs(asV6(storage_).sin6_port);
  return 0;
}

void SocketAddress::setPort(uint16_t port) {
  if (family() == AF_INET) reinterpret_cast<sockaddr_in&>(storage_).sin_port = htons(port);
  if (family() == AF_INET6) reinterpret_cast<sockaddr_in6&>(storage_).sin6_port = htons(port);
}

bool SocketAddress::isLoopback() const {
  if (family() == AF_INET) return ntohl(asV4(storage_).sin_addr.s_addr) >> 24U == 127;
  if (family() != AF_INET6) return false;
  const in6_addr& address = asV6(storage_).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&address) ||
         (IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == 127);
}

socklen_t SocketAddress::rawLength() const {
  if (family() == AF_INET) return sizeof(sockaddr_in);
  if (family() == AF_INET6) return sizeof(sockaddr_in6);
  if (isLocal())  // abstract names end where their length says
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + kLocalPrefix.size() +
                                  localName().size());
  return sizeof(sa_family_t);
}

std::optional<PortRange> PortRange::parse(std::string_view text) {
  PortRange range;
  if (text.empty()) return range;
  const size_t dash = text.find('-');
  if (!parseWhole(text.substr(0, dash), &range.first)) return std::nullopt;
  range.last = range.first;
  if (dash == std::string_view::npos) return range;
  if (!parseWhole(text.substr(dash + 1), &range.last)) return std::nullopt;
  const bool sensible = range.first <= range.last && (range.first != 0 || range.last == 0);
  return sensible ? std::optional<PortRange>(range) : std::nullopt;
}

std::string PortRange::toString() const {
  if (last == 0) return "any port";
  if (first == last) return "port " + std::to_string(first);
  return "ports " + std::to_string(first) + " to " + std::to_string(last);
}

}  // namespace torchft_ext
