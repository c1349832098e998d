#include "child/arena.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

namespace torchft_ext::child {

Arena::Arena(int fd) {
  struct stat found {};
  void* memory = MAP_FAILED;
  if (::fstat(fd, &found) == 0) {
    size_ = static_cast<uint64_t>(found.st_size);
    memory = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (memory == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "cannot map the parent's memory");
  ::madvise(memory, size_, MADV_DONTDUMP);
  memory_ = static_cast<uint8_t*>(memory);
}

std::optional<Buffer> Arena::at(const Span& span) const {
  if (span.offset > size_ || span.bytes > size_ - span.offset) return std::nullopt;
  return Buffer{memory_ + span.offset, span.bytes};
}

}  // namespace torchft_ext::child
