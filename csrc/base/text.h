// Texts of a limited length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace torchft_ext {

// At most so many bytes of a text in UTF-8, without a part of a character at its end. Bytes that
// are no UTF-8 stay as they are.
inline std::string cutText(std::string_view text, size_t most) {
  if (text.size() <= most) return std::string(text);
  constexpr size_t kLongestCharacter = 4;
  const auto continues = [&](size_t at) {
    return (static_cast<uint8_t>(text[at]) & 0xC0U) == 0x80U;
  };
  size_t end = most;
  while (end > 0 && most - end < kLongestCharacter - 1 && continues(end)) --end;
  return std::string(text.substr(0, continues(end) ? most : end));
}

}  // namespace torchft_ext
