// The symbols of a loaded library, those of its symbol table that the dynamic linker does not see
// included.
//
// Threads: const members from any. Throws std::runtime_error where the file cannot be read or has
// no symbol table.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace torchft_ext::nccl_host {

class LibrarySymbols {
 public:
  explicit LibrarySymbols(void* library);  // as dlopen() gave it

  // Null: no such symbol. `name` is the linker's, mangled where it is C++.
  void* find(const std::string& name) const;
  // The symbol that begins at `address`; empty: none.
  std::string nameAt(const void* address) const;
  // All whose name begins so.
  std::map<std::string, void*> beginningWith(const std::string& prefix) const;

 private:
  std::map<std::string, void*> by_name_;
  std::map<const void*, std::string> by_address_;
};

}  // namespace torchft_ext::nccl_host
