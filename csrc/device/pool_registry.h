// Memory pools that a group registers with its device engine, through all of its generations.
//
// Owner: the backend and its engine. Threads: any. add() and remove() block until their deadline at
// most, and call the wait hook, which may throw. After close() nothing is registered any more.
#pragma once

#include <c10/core/Device.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"

namespace torchft_ext {

// As torch's MemPool.id. {0, 0} is none.
struct PoolId {
  uint64_t first = 0;
  uint64_t second = 0;
  auto operator<=>(const PoolId&) const = default;
};
std::string describe(const PoolId& id);  // "(0, 3)"

// One piece of device memory of a pool, of the platform's device with that index.
struct MemorySegment {
  PoolId pool;
  c10::DeviceIndex device = 0;
  uintptr_t address = 0;
  size_t bytes = 0;
  bool operator==(const MemorySegment&) const = default;
};
std::string describe(const MemorySegment& segment);  // "4096 bytes at 0x7f00 of pool (0, 3)"

struct MemoryPool {
  PoolId id;
  std::shared_ptr<void> owner;  // the memory stays mapped while it lives
  std::vector<MemorySegment> segments;
};

struct MemoryOutcome {
  enum class Kind {
    kDone,
    kClosed,   // the group was shut down
    kUnknown,  // no such pool
    kRefused,  // by the engine's library; the generation stands
    kLate,     // not by the deadline
  };
  Kind kind = Kind::kDone;
  std::string why{};
};

class PoolRegistry {
 public:
  virtual ~PoolRegistry() = default;

  // The pool's segments that are new, in the live generation and in all to come. Again: what has
  // come since. Not kDone, or an exception: what this call has registered is deregistered.
  virtual MemoryOutcome add(MemoryPool pool, Deadline deadline) = 0;
  // The pool is forgotten in any case but kClosed, kUnknown, and kLate where its turn did not come.
  // Everything issued that uses it must be complete. Where the engine cannot tell by the deadline
  // that nobody uses the memory any more, the generations concerned fail, and the owner is kept.
  virtual MemoryOutcome remove(const PoolId& id, Deadline deadline) = 0;
  virtual bool knows(const PoolId& id) const = 0;
  virtual void close() = 0;  // forgets all pools; never blocks
};

}  // namespace torchft_ext
