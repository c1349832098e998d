// The board on which the members of one host run a collective in shared memory: each writes which
// step it has published and up to which step it reads no more, and waits for the others.
//
// Step s of a generation uses line s mod kLines of each member's control page. A line is written
// when every peer's `done` is at least s - kLines. Chunk c uses slot c mod kSlots, by a rule of the
// program's. See docs/shared_memory.md, "Order of memory", for why nothing is read while it is
// written.
//
// Owner: the lane. Threads: one at a time, the executor, but for wakeExecutor(). Only wait()
// blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "host/shared_memory.h"

namespace torchft_ext {

inline constexpr uint64_t kSharedLines = 16;
inline constexpr uint64_t kSharedSlots = 4;
inline constexpr size_t kSharedControlBytes = 4096;
inline constexpr size_t kSharedPayloadBytes = 80;

// The mark of a publication names its operation. Ranks with unequal marks do not run the same one.
struct SharedOperationMark {
  uint64_t number = 0;     // of the exchange in the generation
  uint64_t history = 0;    // a hash of all exchanges before it
  uint64_t signature = 0;  // of the operation, as schedules have it
  uint64_t bytes = 0;      // of the step, as who reads them expects
  friend bool operator==(const SharedOperationMark&, const SharedOperationMark&) = default;
};

// Lies in the shared page: trivial, of fixed layout, and without pointers.
struct alignas(128) SharedLine {
  std::atomic<uint64_t> step;  // written last
  std::atomic<uint64_t> done;
  std::atomic<uint64_t> number;
  std::atomic<uint64_t> history;
  std::atomic<uint64_t> signature;
  std::atomic<uint64_t> bytes;
  std::array<uint8_t, kSharedPayloadBytes> payload;
};

struct SharedControl {
  alignas(64) std::atomic<uint32_t> waiting;  // 0, or for whom and how
  std::atomic<uint32_t> bell;
  alignas(64) std::atomic<uint64_t> done;
  alignas(128) std::array<SharedLine, kSharedLines> lines;
};
static_assert(sizeof(SharedLine) == 128 && sizeof(SharedControl) <= kSharedControlBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

class SharedBoard {
 public:
  // nudge: tells an armed peer, by another way, that there is something for it. Never blocks.
  SharedBoard(std::shared_ptr<SharedMemory> memory, int rank, int size,
              std::function<void(int peer)> nudge);

  size_t slotBytes() const { return slot_bytes_; }
  static size_t regionBytes(size_t slot_bytes) {
    return kSharedControlBytes + kSharedSlots * slot_bytes;
  }

  // ---- writing
  uint8_t* ownPayload(uint64_t step) { return own_->lines[step % kSharedLines].payload.data(); }
  uint8_t* ownSlot(uint64_t chunk) { return slot(rank_, chunk); }
  // False: there is no memory for the slots.
  bool prepareSlots();
  void publish(uint64_t step, const SharedOperationMark& mark);
  // This rank reads nothing of steps up to this one any more. Ascending. Told with the next
  // publication; by tellDone() at once.
  void setDone(uint64_t step) { own_done_ = step; }
  void tellDone();

  // ---- reading
  const uint8_t* payloadOf(int peer, uint64_t step) const {
    return control(peer).lines[step % kSharedLines].payload.data();
  }
  const uint8_t* slotOf(int peer, uint64_t chunk) const { return slot(peer, chunk); }
  // Has it published that step? kBeyond: one that cannot be while this rank waits.
  enum class Published { kNotYet, kYes, kBeyond };
  Published published(int peer, uint64_t step);
  // The peer's mark of that step; after kYes, or kBeyond.
  SharedOperationMark markOf(int peer, uint64_t step) const;
  // Has it read all of the steps up to this one?
  bool hasDone(int peer, uint64_t step);

  // ---- waiting
  enum class Waited { kReady, kPaused, kOver };
  struct Patience {
    int spins = 200;
    Clock::time_point until;  // then kPaused: the caller has other things to do now and then
  };
  // Until ready() says so, which looks at that peer's page alone. over(): asked in every round but
  // those of spinning.
  Waited wait(int peer, const Patience& patience, const std::function<bool()>& ready,
              const std::function<bool()>& over);
  // A wait that goes on after a pause does not begin to yield again, unless this was called.
  void noteProgress() { waits_since_.reset(); }
  // From now on that peer nudges this one when it publishes, or is done with something. Look again
  // after it.
  void arm(int peer);
  void disarm();
  // Any thread: an executor that sleeps in wait() looks at over() now.
  void wakeExecutor();

 private:
  SharedControl& control(int of) const {
    return *reinterpret_cast<SharedControl*>(memory_->at(of));
  }
  uint8_t* slot(int of, uint64_t chunk) const {
    return memory_->at(of) + kSharedControlBytes + chunk % kSharedSlots * slot_bytes_;
  }
  void announceWait(int peer, uint32_t how);
  void ring();
  void sleep(int peer, const std::function<bool()>& ready);

  const std::shared_ptr<SharedMemory> memory_;
  const int rank_;
  const int size_;
  const size_t slot_bytes_;
  const std::function<void(int)> nudge_;
  SharedControl* const own_;
  uint64_t own_done_ = 0;
  std::vector<uint64_t> done_;    // of peers, as far as it is known
  std::vector<uint32_t> nudged_;  // the last of each peer's waits for which this rank nudged it
  uint32_t waits_ = 0;
  std::optional<Clock::time_point> waits_since_;
  bool slots_are_there_ = false;
  std::atomic<std::atomic<uint32_t>*> sleeps_on_{nullptr};
};

}  // namespace torchft_ext
