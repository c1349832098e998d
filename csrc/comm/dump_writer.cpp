#include "comm/dump_writer.h"

#include <array>
#include <cstdio>

namespace torchft_ext {
namespace {

// How many bytes the character has that begins there; 0: none begins there.
size_t characterAt(std::string_view text, size_t at) {
  const auto byte = [&](size_t index) { return static_cast<uint8_t>(text[index]); };
  const uint8_t first = byte(at);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xC2 && first < 0xE0   ? 2
                        : first >= 0xE0 && first < 0xF0 ? 3
                        : first >= 0xF0 && first < 0xF5 ? 4
                                                        : 0;
  if (length == 0 || text.size() - at < length) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(at + i) & 0xC0U) != 0x80U) return 0;
  const uint8_t second = byte(at + 1);  // no longer than needed, no surrogate, none beyond the last
  const bool wrong = (first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
                     (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F);
  return wrong ? 0 : length;
}

template <typename Take>
void forEachCharacter(std::string_view text, Take take) {
  for (size_t at = 0; at < text.size();) {
    const size_t length = characterAt(text, at);
    take(length == 0 ? std::string_view("?") : text.substr(at, length));
    at += length == 0 ? 1 : length;
  }
}

std::string littleEndian(uint64_t value, size_t bytes) {
  std::string out;
  for (size_t i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
  return out;
}

}  // namespace

// ---------------------------------------------------------------- JSON

void JsonWriter::separate() {
  if (!first_) out_ += ", ";
  first_ = false;
}

void JsonWriter::beginDict() {
  separate();
  out_ += '{';
  first_ = true;
}

void JsonWriter::endDict() {
  out_ += '}';
  first_ = false;
}

void JsonWriter::beginList() {
  separate();
  out_ += '[';
  first_ = true;
}

void JsonWriter::endList() {
  out_ += ']';
  first_ = false;
}

void JsonWriter::key(std::string_view name) {
  separate();
  quote(name);
  out_ += ": ";
  first_ = true;
}

void JsonWriter::quote(std::string_view value) {
  out_ += '"';
  forEachCharacter(value, [this](std::string_view character) {
    const auto byte = static_cast<uint8_t>(character[0]);
    if (byte < 0x20) {
      std::array<char, 8> escaped{};
      static_cast<void>(std::snprintf(escaped.data(), escaped.size(), "\\u%04x", byte));
      out_ += escaped.data();
      return;
    }
    if (byte == '"' || byte == '\\') out_ += '\\';
    out_ += character;
  });
  out_ += '"';
}

void JsonWriter::text(std::string_view value) {
  separate();
  quote(value);
}

void JsonWriter::number(int64_t value) {
  separate();
  out_ += std::to_string(value);
}

void JsonWriter::boolean(bool value) {
  separate();
  out_ += value ? "true" : "false";
}

void JsonWriter::null() {
  separate();
  out_ += "null";
}

std::string JsonWriter::finish() {
  return out_ + "\n";
}

// ---------------------------------------------------------------- pickle

// The codes are those of Python's pickletools.
PickleWriter::PickleWriter() : out_("\x80\x02") {}

void PickleWriter::beginDict() {
  out_ += '(';  // MARK
}

void PickleWriter::endDict() {
  out_ += 'd';  // DICT
}

void PickleWriter::beginList() {
  out_ += '(';
}

void PickleWriter::endList() {
  out_ += 'l';  // LIST
}

void PickleWriter::key(std::string_view name) {
  text(name);
}

void PickleWriter::text(std::string_view value) {
  std::string valid;
  forEachCharacter(value, [&valid](std::string_view character) { valid += character; });
  out_ += 'X' + littleEndian(valid.size(), 4) + valid;  // BINUNICODE
}

void PickleWriter::number(int64_t value) {
  out_ += "\x8a\x08" + littleEndian(static_cast<uint64_t>(value), 8);  // LONG1, of 8 bytes
}

void PickleWriter::boolean(bool value) {
  out_ += value ? '\x88' : '\x89';  // NEWTRUE, NEWFALSE
}

void PickleWriter::null() {
  out_ += 'N';  // NONE
}

std::string PickleWriter::finish() {
  return out_ + ".";  // STOP
}

}  // namespace torchft_ext
