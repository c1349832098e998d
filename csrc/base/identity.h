// 128 random bits under four names that the compiler tells apart, and the one source of randomness.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace torchft_ext {

// Fills from getrandom(2); throws std::system_error if the kernel has none.
std::array<uint8_t, 16> randomBytes16();

std::string hexOf(const std::array<uint8_t, 16>& bytes);                     // 32 lower-case digits
std::optional<std::array<uint8_t, 16>> bytesFromHex(std::string_view text);  // nullopt if malformed

template <typename Tag>
struct Identity {
  std::array<uint8_t, 16> bytes{};

  static Identity random() { return Identity{randomBytes16()}; }
  std::string hex() const { return hexOf(bytes); }
  static std::optional<Identity> fromHex(std::string_view text) {
    const auto parsed = bytesFromHex(text);
    return parsed ? std::optional<Identity>(Identity{*parsed}) : std::nullopt;
  }
  bool isZero() const { return bytes == std::array<uint8_t, 16>{}; }

  friend bool operator==(const Identity&, const Identity&) = default;
  friend auto operator<=>(const Identity&, const Identity&) = default;
};

using Incarnation = Identity<struct IncarnationTag>;  // one process's life
using Nonce = Identity<struct NonceTag>;              // one attempt to form a generation
using Token = Identity<struct TokenTag>;              // one rank's part in one attempt

// What a peer must show before it is admitted to a generation. Each side shows its own half, so
// that a stranger who accepts a connection learns nothing that would let it accept or connect
// elsewhere as the other side. Compared in constant time.
struct GenerationSecret {
  Identity<struct ConnectorHalf> connector;
  Identity<struct AcceptorHalf> acceptor;
  static GenerationSecret random();
  friend bool operator==(const GenerationSecret&, const GenerationSecret&) = default;
};
bool equalInConstantTime(const std::array<uint8_t, 16>& a, const std::array<uint8_t, 16>& b);

// This process's incarnation: drawn at first use, drawn anew in a forked child.
Incarnation selfIncarnation();

}  // namespace torchft_ext
