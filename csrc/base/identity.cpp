#include "base/identity.h"

#include <sys/random.h>

#include <cerrno>
#include <system_error>

#include "base/fork.h"
#include "base/sole_copy.h"

namespace torchft_ext {
namespace {

int digitValue(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  if (digit >= 'A' && digit <= 'F') return digit - 'A' + 10;
  return -1;
}

struct OwnIncarnation {
  OwnIncarnation() { requireSoleCopy(); }
  Incarnation value = Incarnation::random();
};
PerProcess<OwnIncarnation> own_incarnation;

}  // namespace

std::array<uint8_t, 16> randomBytes16() {
  std::array<uint8_t, 16> bytes{};
  size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t got = ::getrandom(bytes.data() + have, bytes.size() - have, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) throw std::system_error(errno, std::generic_category(), "getrandom");
    have += static_cast<size_t>(got);
  }
  return bytes;
}

std::string hexOf(const std::array<uint8_t, 16>& bytes) {
  static constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const unsigned byte : bytes) {
    text += kDigits[byte >> 4U];
    text += kDigits[byte & 15U];
  }
  return text;
}

std::optional<std::array<uint8_t, 16>> bytesFromHex(std::string_view text) {
  std::array<uint8_t, 16> bytes{};
  if (text.size() != 2 * bytes.size()) return std::nullopt;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const int high = digitValue(text[2 * i]);
    const int low = digitValue(text[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    bytes[i] = static_cast<uint8_t>(high * 16 + low);
  }
  return bytes;
}

GenerationSecret GenerationSecret::random() {
  return {Identity<ConnectorHalf>::random(), Identity<AcceptorHalf>::random()};
}

bool equalInConstantTime(const std::array<uint8_t, 16>& a, const std::array<uint8_t, 16>& b) {
  volatile uint8_t difference = 0;  // volatile: the compiler must not leave the loop early
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  }
  return difference == 0;
}

Incarnation selfIncarnation() {
  return own_incarnation.get().value;
}

}  // namespace torchft_ext
