// Simulated device memory that other processes can open: segments of 2 MiB or more, of which
// allocations have parts, as CUDA's caching allocator gives them. Each is an anonymous file
// (memfd). A segment goes once nothing of it is in use; the next one at its address is another
// file.
//
// Owner: the process. Threads: any; nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "base/mutex.h"
#include "base/unique_fd.h"

namespace torchft_ext::sim {

class Segments {
 public:
  struct Place {
    uintptr_t base = 0;
    size_t bytes = 0;
    int descriptor = -1;  // open as long as the segment is there
    uint64_t file = 0;    // its inode: never used twice
  };

  static Segments& instance();

  // Null: no descriptor, or no memory.
  void* take(size_t bytes, int device);
  void give(uintptr_t data);
  // Of the segment around it. nullopt: it is in none.
  std::optional<Place> around(const void* inside) const;
  size_t live() const;

 private:
  struct Segment {
    UniqueFd file;
    Place place;
    int device = 0;
    std::map<uintptr_t, size_t> used{};  // by address
  };
  static uintptr_t freeIn(const Segment& segment, size_t bytes);  // 0: none
  Segment* made(size_t bytes, int device) REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::map<uintptr_t, Segment> segments_ GUARDED_BY(mutex_);  // by address
};

}  // namespace torchft_ext::sim
