// What is registered in one NCCL communicator, and what keeps that memory alive.
//
// NCCL and the peers may reach registered memory until it is deregistered, or until NCCL has freed
// the communicator. So each entry holds the owner of its pool until then, whatever the registry has
// forgotten meanwhile. Where NCCL never says that it is done, the owners are kept until the process
// ends.
//
// Owner: the device communicator. Threads: whoever is inside its gate, or has closed and emptied
// it; holdsAny() from any. Owners go on the callback thread, since the end of one may need the GIL.
// What is called in NCCL may block: remove() for as long as a peer's proxy does not answer.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/fork.h"
#include "device/pool_registry.h"
#include "nccl/nccl_api.h"

namespace torchft_ext {

// Later, on the callback thread: the last reference may be Python's, and whoever ends communicators
// or generations must not wait for the GIL.
void releaseLater(std::vector<std::shared_ptr<void>> owners);
// In a forked child: they are the parent's.
void releaseNever(std::vector<std::shared_ptr<void>> owners);

class CommMemory {
 public:
  using Chosen = std::function<bool(const MemorySegment&)>;

  CommMemory() = default;
  ~CommMemory();
  CommMemory(const CommMemory&) = delete;
  CommMemory& operator=(const CommMemory&) = delete;

  bool has(const MemorySegment& segment) const;
  NcclResult add(NcclApi& nccl, NcclComm comm, const MemorySegment& segment,
                 std::shared_ptr<void> owner);
  // Deregisters those chosen, all of them though one is refused: that one keeps its owner. The
  // first error, or kSuccess.
  NcclResult remove(NcclApi& nccl, NcclComm comm, const Chosen& chosen);
  void releaseBuffers();  // NCCL has freed the communicator

  bool holdsAny() const { return holds_any_.load(std::memory_order_acquire); }

 private:
  struct Entry {
    MemorySegment segment;
    void* handle = nullptr;  // NCCL may succeed without one (NCCL_LOCAL_REGISTER=0)
    std::shared_ptr<void> owner;
    bool removed = false;
  };
  const uint64_t fork_count_ = forkCount();
  std::vector<Entry> entries_;
  std::atomic<bool> holds_any_{false};  // by the same threads
};

}  // namespace torchft_ext
