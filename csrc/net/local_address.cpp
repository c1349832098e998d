#include "net/local_address.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "base/identity.h"

namespace torchft_ext {
namespace {

constexpr uint64_t kFnvOffset = 0xcbf29ce484222325;
constexpr uint64_t kFnvPrime = 0x100000001b3;
constexpr size_t kPlaceDigits = 16;

// FNV-1a: the same in every build, and nothing depends on its being hard to turn back.
uint64_t digestOf(std::string_view text) {
  uint64_t digest = kFnvOffset;
  for (const char letter : text) digest = (digest ^ static_cast<uint8_t>(letter)) * kFnvPrime;
  return digest;
}

// "": unknown.
std::string findPlace() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat space {};
  if (boot.empty() || ::stat("/proc/self/ns/net", &space) != 0) return "";
  const std::string whole = boot + "/" + std::to_string(space.st_dev) + "/" +
                            std::to_string(static_cast<uint64_t>(space.st_ino));
  std::array<char, kPlaceDigits + 1> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx",
                static_cast<unsigned long long>(digestOf(whole)));
  return digits.data();
}

// Never destroyed: threads may ask while the process exits.
const std::string& place() {
  static const auto* const found = new std::string(findPlace());
  return *found;
}

}  // namespace

std::optional<SocketAddress> newLocalAddress() {
  if (place().empty()) return std::nullopt;
  return SocketAddress::fromLocalName(place() + "-" + Nonce::random().hex());
}

bool isReachableFromHere(const SocketAddress& address) {
  if (!address.isLocal()) return true;
  const std::string name = address.localName();
  return !place().empty() && name.substr(0, kPlaceDigits) == place();
}

bool isOfOwnUser(int fd) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

std::vector<SocketAddress> withoutLocal(const std::vector<SocketAddress>& addresses) {
  std::vector<SocketAddress> others;
  std::copy_if(addresses.begin(), addresses.end(), std::back_inserter(others),
               [](const SocketAddress& address) { return !address.isLocal(); });
  return others;
}

}  // namespace torchft_ext
