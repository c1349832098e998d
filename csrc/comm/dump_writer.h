// Writes a tree of plain values as text: as JSON, or as a pickle (protocol 2) that loads as dicts,
// lists, texts, whole numbers, booleans and None, and names no class.
//
// Owner: whoever makes it. Threads: one. It only appends to a string, and never blocks. A dict has
// a key() before each value. Texts are UTF-8; a byte that is not becomes '?'.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace torchft_ext {

class DumpWriter {
 public:
  virtual ~DumpWriter() = default;
  virtual void beginDict() = 0;
  virtual void endDict() = 0;
  virtual void beginList() = 0;
  virtual void endList() = 0;
  virtual void key(std::string_view name) = 0;
  virtual void text(std::string_view value) = 0;
  virtual void number(int64_t value) = 0;
  virtual void boolean(bool value) = 0;
  virtual void null() = 0;
  // The whole of it, once every dict and list has ended.
  virtual std::string finish() = 0;
};

class JsonWriter : public DumpWriter {
 public:
  void beginDict() override;
  void endDict() override;
  void beginList() override;
  void endList() override;
  void key(std::string_view name) override;
  void text(std::string_view value) override;
  void number(int64_t value) override;
  void boolean(bool value) override;
  void null() override;
  std::string finish() override;

 private:
  void separate();
  void quote(std::string_view value);

  std::string out_;
  bool first_ = true;  // of its dict or list, or behind a key: no comma before it
};

class PickleWriter : public DumpWriter {
 public:
  PickleWriter();
  void beginDict() override;
  void endDict() override;
  void beginList() override;
  void endList() override;
  void key(std::string_view name) override;
  void text(std::string_view value) override;
  void number(int64_t value) override;
  void boolean(bool value) override;
  void null() override;
  std::string finish() override;

 private:
  std::string out_;
};

}  // namespace torchft_ext
