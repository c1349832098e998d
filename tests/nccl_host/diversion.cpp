#include "diversion.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace torchft_ext::nccl_host {

#ifdef __x86_64__

void divert(void* from, const void* to) {
  unsigned char jump[14] = {0xff, 0x25, 0, 0, 0, 0};  // jmp *0(%rip), and the address after it
  std::memcpy(jump + 6, static_cast<const void*>(&to), sizeof to);
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto at = reinterpret_cast<uintptr_t>(from);
  auto* const first = reinterpret_cast<void*>(at / page * page);
  const size_t bytes = at % page + sizeof jump;
  if (::mprotect(first, bytes, PROT_READ | PROT_WRITE | PROT_EXEC) != 0)
    throw std::runtime_error("code of a library may not be written here");
  std::memcpy(from, jump, sizeof jump);
  if (::mprotect(first, bytes, PROT_READ | PROT_EXEC) != 0)
    throw std::runtime_error("code of a library cannot be protected again");
}

#else

void divert(void*, const void*) {
  throw std::runtime_error("only on x86-64");
}

#endif

}  // namespace torchft_ext::nccl_host
