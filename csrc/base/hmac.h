// HMAC-SHA256 (RFC 2104, FIPS 180-4), for the proofs that two processes know one key. Pure
// functions; no library that this package links has one.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace torchft_ext {

using Digest256 = std::array<uint8_t, 32>;

Digest256 sha256(std::string_view bytes);
Digest256 hmacSha256(std::string_view key, std::string_view message);

}  // namespace torchft_ext
