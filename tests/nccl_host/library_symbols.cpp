#include "library_symbols.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <cstring>
#include <fstream>
#include <stdexcept>
#include <vector>

namespace torchft_ext::nccl_host {
namespace {

class File {
 public:
  explicit File(const std::string& path) : path_(path), in_(path, std::ios::binary) {}

  template <class T>
  std::vector<T> read(uint64_t offset, uint64_t bytes) {
    std::vector<T> out(bytes / sizeof(T));
    in_.seekg(static_cast<std::streamoff>(offset));
    in_.read(reinterpret_cast<char*>(out.data()),
             static_cast<std::streamsize>(out.size() * sizeof(T)));
    if (!in_) throw std::runtime_error(path_ + " ends too soon for a library");
    return out;
  }

 private:
  const std::string path_;
  std::ifstream in_;
};

}  // namespace

LibrarySymbols::LibrarySymbols(void* library) {
  link_map* map = nullptr;
  if (::dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) throw std::runtime_error(::dlerror());
  File file(map->l_name);
  const Elf64_Ehdr header = file.read<Elf64_Ehdr>(0, sizeof(Elf64_Ehdr)).front();
  const auto sections =
      file.read<Elf64_Shdr>(header.e_shoff, uint64_t{header.e_shnum} * sizeof(Elf64_Shdr));
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_type != SHT_SYMTAB) continue;
    const Elf64_Shdr& strings = sections.at(section.sh_link);
    const auto names = file.read<char>(strings.sh_offset, strings.sh_size);
    for (const Elf64_Sym& symbol : file.read<Elf64_Sym>(section.sh_offset, section.sh_size)) {
      const unsigned type = ELF64_ST_TYPE(symbol.st_info);
      if (symbol.st_shndx == SHN_UNDEF || (type != STT_FUNC && type != STT_OBJECT)) continue;
      void* address = reinterpret_cast<void*>(map->l_addr + symbol.st_value);
      const std::string name = &names.at(symbol.st_name);
      by_name_[name] = address;
      by_address_[address] = name;
    }
    return;
  }
  throw std::runtime_error(std::string(map->l_name) + " has no symbol table: it was stripped");
}

void* LibrarySymbols::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

std::string LibrarySymbols::nameAt(const void* address) const {
  const auto found = by_address_.find(address);
  return found == by_address_.end() ? std::string() : found->second;
}

std::map<std::string, void*> LibrarySymbols::beginningWith(const std::string& prefix) const {
  std::map<std::string, void*> all;
  for (auto each = by_name_.lower_bound(prefix);
       each != by_name_.end() && each->first.compare(0, prefix.size(), prefix) == 0; ++each)
    all.insert(*each);
  return all;
}

}  // namespace torchft_ext::nccl_host
