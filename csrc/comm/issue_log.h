// The operations that this rank has issued in a generation, for ranks that wait for it: the last
// one, and the last kKept collectives that all ranks issue in one order.
//
// Owner: the generation's lifecycle. Threads: note() one at a time, in the order of issue; the rest
// any, at the same time. It never blocks, takes no lock and allocates nothing: each operation that
// is issued passes here.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "base/deadline.h"
#include "comm/operation.h"

namespace torchft_ext {

struct IssuedOperation {
  OpKind kind = OpKind::kBarrier;
  int root = 0;      // 0 where the kind has none
  int64_t seq = -1;  // in errors, this rank's own count; -1: it has none
  Clock::time_point at{};
  friend bool operator==(const IssuedOperation&, const IssuedOperation&) = default;
};

class IssueLog {
 public:
  static constexpr uint64_t kKept = 32;
  // Of an operation that is not counted alike on all ranks.
  static constexpr uint64_t kNoPlace = ~uint64_t{0};

  // ordered: it takes the next place among the collectives that all ranks issue in one order.
  void note(const IssuedOperation& operation, bool ordered);

  std::optional<IssuedOperation> last() const { return last_.read(); }  // nullopt: none yet
  // How many ordered collectives there were. The first has place 0.
  uint64_t collectives() const { return collectives_.load(std::memory_order_acquire); }
  // nullopt: not issued yet, or so long ago that it is forgotten.
  std::optional<IssuedOperation> collective(uint64_t place) const;

 private:
  // Readers take it again where it was written meanwhile: `version` is odd during that. All stores
  // are releases and all loads acquires, so that no field is seen before its version.
  class Slot {
   public:
    void write(const IssuedOperation& operation);
    std::optional<IssuedOperation> read() const;

   private:
    std::atomic<uint64_t> version_{0};
    std::atomic<uint64_t> what_{0};  // kind and root
    std::atomic<int64_t> seq_{0};
    std::atomic<int64_t> at_{0};
  };

  Slot last_;
  std::array<Slot, kKept> ordered_;  // by place, modulo kKept
  std::atomic<uint64_t> collectives_{0};
};

}  // namespace torchft_ext
