#include "sim_segments.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace torchft_ext::sim {
namespace {

constexpr size_t kLeast = 2U << 20U;
constexpr size_t kAligned = 512;
constexpr size_t kPage = 4096;

size_t rounded(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

}  // namespace

Segments& Segments::instance() {
  static auto* const segments = new Segments;  // tensors may outlive static objects
  return *segments;
}

uintptr_t Segments::freeIn(const Segment& segment, size_t bytes) {
  uintptr_t begin = segment.place.base;
  for (const auto& [address, length] : segment.used) {
    if (address - begin >= bytes) return begin;
    begin = address + length;
  }
  return segment.place.base + segment.place.bytes - begin >= bytes ? begin : 0;
}

Segments::Segment* Segments::made(size_t bytes, int device) {
  Segment segment;
  segment.device = device;
  segment.file = UniqueFd(::memfd_create("torchft_ext_sim-memory", MFD_CLOEXEC));
  segment.place.bytes = rounded(std::max(bytes, kLeast), kPage);
  segment.place.descriptor = segment.file.get();
  struct stat found {};
  if (segment.file.get() < 0 ||
      ::ftruncate(segment.file.get(), static_cast<off_t>(segment.place.bytes)) != 0 ||
      ::fstat(segment.file.get(), &found) != 0)
    return nullptr;
  segment.place.file = found.st_ino;
  void* memory = ::mmap(nullptr, segment.place.bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                        segment.file.get(), 0);
  if (memory == MAP_FAILED) return nullptr;
  segment.place.base = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t base = segment.place.base;
  return &segments_.emplace(base, std::move(segment)).first->second;
}

void* Segments::take(size_t bytes, int device) {
  const size_t length = rounded(bytes, kAligned);
  MutexLock lock(mutex_);
  Segment* chosen = nullptr;
  uintptr_t address = 0;
  for (auto& [base, segment] : segments_) {
    if (segment.device != device) continue;
    address = freeIn(segment, length);
    if (address == 0) continue;
    chosen = &segment;
    break;
  }
  if (chosen == nullptr) {
    chosen = made(length, device);
    if (chosen == nullptr) return nullptr;
    address = chosen->place.base;
  }
  chosen->used.emplace(address, length);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): kept as a number, for order
  return reinterpret_cast<void*>(address);
}

void Segments::give(uintptr_t data) {
  MutexLock lock(mutex_);
  const auto found = std::prev(segments_.upper_bound(data));
  Segment& segment = found->second;
  segment.used.erase(data);
  if (!segment.used.empty()) return;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): as above
  ::munmap(reinterpret_cast<void*>(segment.place.base), segment.place.bytes);
  segments_.erase(found);
}

std::optional<Segments::Place> Segments::around(const void* inside) const {
  const auto address = reinterpret_cast<uintptr_t>(inside);
  MutexLock lock(mutex_);
  const auto after = segments_.upper_bound(address);
  if (after == segments_.begin()) return std::nullopt;
  const Place& place = std::prev(after)->second.place;
  if (address >= place.base + place.bytes) return std::nullopt;
  return place;
}

size_t Segments::live() const {
  MutexLock lock(mutex_);
  return segments_.size();
}

}  // namespace torchft_ext::sim
