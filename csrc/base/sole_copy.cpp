#include "base/sole_copy.h"

#include <elf.h>
#include <link.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace torchft_ext {
namespace {

using Mark = std::atomic<uint32_t>;
constexpr uint32_t kUnused = 0;
constexpr uint32_t kClaiming = 1;
constexpr uint32_t kInUse = 2;

}  // namespace
}  // namespace torchft_ext

// Named for the assembler, and hidden: each copy has its own.
extern "C" __attribute__((visibility("hidden"))) torchft_ext::Mark torchft_ext_mark;
__attribute__((used)) torchft_ext::Mark torchft_ext_mark{torchft_ext::kUnused};

// The note of this copy: how far away its mark is, which no relocation at load need tell. Copies of
// other versions read it too: it stays as it is.
asm(R"(
  .pushsection .note.torchft_ext, "a", %note
  .balign 4
  .long 12, 8, 1
  .asciz "torchft_ext"
1:
  .quad torchft_ext_mark - 1b
  .popsection
)");

namespace torchft_ext {
namespace {

constexpr std::string_view kNoteName{"torchft_ext\0", 12};
constexpr uint32_t kNoteType = 1;

struct Others {
  std::optional<std::string> in_use;  // the file of a copy that is; "": the program itself
};

size_t aligned(size_t size, size_t to) {
  return (size + to - 1) / to * to;
}

// The mark that a note leads to; null: it is not of this library.
Mark* markOf(const ElfW(Nhdr) & note, const char* name, const char* content) {
  if (note.n_type != kNoteType || note.n_descsz != sizeof(int64_t) ||
      std::string_view(name, note.n_namesz) != kNoteName) {
    return nullptr;
  }
  int64_t distance = 0;
  std::memcpy(&distance, content, sizeof(distance));
  return reinterpret_cast<Mark*>(const_cast<char*>(content) + distance);
}

// Of one segment of notes.
bool hasOtherInUse(const char* at, size_t bytes, size_t alignment) {
  while (bytes >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) note;
    std::memcpy(&note, at, sizeof(note));
    const size_t content = aligned(sizeof(note) + note.n_namesz, alignment);
    const size_t whole = aligned(content + note.n_descsz, alignment);
    if (whole > bytes) return false;
    const Mark* const mark = markOf(note, at + sizeof(note), at + content);
    if (mark != nullptr && mark != &torchft_ext_mark && mark->load() != kUnused) return true;
    at += whole;
    bytes -= whole;
  }
  return false;
}

int lookAt(dl_phdr_info* object, size_t, void* context) {
  for (size_t i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = object->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const auto* const at = reinterpret_cast<const char*>(object->dlpi_addr + segment.p_vaddr);
    if (hasOtherInUse(at, segment.p_memsz, segment.p_align == 8 ? 8 : 4)) {
      static_cast<Others*>(context)->in_use = object->dlpi_name;
      return 1;
    }
  }
  return 0;
}

}  // namespace

void requireSoleCopy() {
  if (torchft_ext_mark.load() == kInUse) return;
  // Seen by other copies before this one looks at theirs: of two at once at most one goes on.
  uint32_t unused = kUnused;
  torchft_ext_mark.compare_exchange_strong(unused, kClaiming);
  Others others;
  dl_iterate_phdr(lookAt, &others);
  if (!others.in_use) {
    torchft_ext_mark.store(kInUse);
    return;
  }
  uint32_t claiming = kClaiming;
  torchft_ext_mark.compare_exchange_strong(claiming, kUnused);
  const std::string where = others.in_use->empty() ? "the program itself" : *others.in_use;
  throw std::logic_error("this process has a second copy of torchft_ext's core library, and " +
                         where +
                         " is in use already: two would be two members in one process. Link the "
                         "program and all its libraries to one libtorchft_ext_core.so");
}

}  // namespace torchft_ext
