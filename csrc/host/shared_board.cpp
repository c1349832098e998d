#include "host/shared_board.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torchft_ext {
namespace {

constexpr milliseconds kYieldFor{1};
constexpr long kSleepAtMostNanoseconds =
    10'000'000;  // a wake may be lost with who would have sent it

// In `waiting`: how, and for whom.
constexpr uint32_t kSleeps = 1;
constexpr uint32_t kArmed = 2;
// each wait differs from the one before, so that one nudge is enough for it
constexpr uint32_t kPeerBits = 14;
constexpr uint32_t waitingFor(int peer, uint32_t how, uint32_t count) {
  return count << (kPeerBits + 2U) | (static_cast<uint32_t>(peer) + 1) << 2U | how;
}
constexpr bool isFor(uint32_t waiting, int rank) {
  return (waiting >> 2U & ((1U << kPeerBits) - 1)) == static_cast<uint32_t>(rank) + 1;
}

void pauseBriefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Between processes; an address that is mapped to be read alone will do.
void futexWait(const std::atomic<uint32_t>* word, uint32_t seen) {
  const timespec at_most{0, kSleepAtMostNanoseconds};
  ::syscall(SYS_futex, word, FUTEX_WAIT, seen, &at_most, nullptr, 0);
}
void futexWakeAll(const std::atomic<uint32_t>* word) {
  ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

SharedBoard::SharedBoard(std::shared_ptr<SharedMemory> memory, int rank, int size,
                         std::function<void(int peer)> nudge)
    : memory_(std::move(memory)),
      rank_(rank),
      size_(size),
      slot_bytes_((memory_->regionBytes() - kSharedControlBytes) / kSharedSlots),
      nudge_(std::move(nudge)),
      own_(&control(rank)),
      done_(static_cast<size_t>(size), 0),
      nudged_(static_cast<size_t>(size), 0) {}

bool SharedBoard::prepareSlots() {
  if (!slots_are_there_) {
    slots_are_there_ = memory_->populate(rank_, kSharedControlBytes, kSharedSlots * slot_bytes_);
  }
  return slots_are_there_;
}

// ---- writing

void SharedBoard::publish(uint64_t step, const SharedOperationMark& mark) {
  SharedLine& line = own_->lines[step % kSharedLines];
  line.done.store(own_done_, std::memory_order_relaxed);
  line.number.store(mark.number, std::memory_order_relaxed);
  line.history.store(mark.history, std::memory_order_relaxed);
  line.signature.store(mark.signature, std::memory_order_relaxed);
  line.bytes.store(mark.bytes, std::memory_order_relaxed);
#if defined(__x86_64__)
  _mm_sfence();  // of copies that passed the caches by
#endif
  line.step.store(step, std::memory_order_release);
  own_->done.store(own_done_, std::memory_order_release);  // for who does not read this line
  ring();
}

void SharedBoard::tellDone() {
  own_->done.store(own_done_, std::memory_order_release);
  ring();
}

// Dekker's, with announceWait(): either this sees the waiter, or the waiter sees what was stored.
void SharedBoard::ring() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool sleeps = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const uint32_t waiting = control(peer).waiting.load(std::memory_order_relaxed);
    if (!isFor(waiting, rank_)) continue;
    sleeps = sleeps || (waiting & kSleeps) != 0;
    uint32_t& nudged = nudged_[static_cast<size_t>(peer)];
    if ((waiting & kArmed) != 0 && std::exchange(nudged, waiting) != waiting) nudge_(peer);
  }
  if (!sleeps) return;
  own_->bell.fetch_add(1, std::memory_order_release);
  futexWakeAll(&own_->bell);
}

// ---- reading

SharedBoard::Published SharedBoard::published(int peer, uint64_t step) {
  const SharedLine& line = control(peer).lines[step % kSharedLines];
  const uint64_t found = line.step.load(std::memory_order_acquire);
  if (found < step) return Published::kNotYet;
  uint64_t& done = done_[static_cast<size_t>(peer)];
  done = std::max(done, line.done.load(std::memory_order_relaxed));
  return found == step ? Published::kYes : Published::kBeyond;
}

SharedOperationMark SharedBoard::markOf(int peer, uint64_t step) const {
  const SharedLine& line = control(peer).lines[step % kSharedLines];
  return {line.number.load(std::memory_order_relaxed), line.history.load(std::memory_order_relaxed),
          line.signature.load(std::memory_order_relaxed),
          line.bytes.load(std::memory_order_relaxed)};
}

bool SharedBoard::hasDone(int peer, uint64_t step) {
  uint64_t& done = done_[static_cast<size_t>(peer)];
  if (done >= step) return true;
  done = std::max(done, control(peer).done.load(std::memory_order_acquire));
  return done >= step;
}

// ---- waiting

SharedBoard::Waited SharedBoard::wait(int peer, const Patience& patience,
                                      const std::function<bool()>& ready,
                                      const std::function<bool()>& over) {
  for (int spin = 0; spin < patience.spins; ++spin) {
    if (ready()) {
      waits_since_.reset();
      return Waited::kReady;
    }
    pauseBriefly();
  }
  if (!waits_since_) waits_since_ = Clock::now();
  while (!ready()) {
    if (over()) return Waited::kOver;
    const Clock::time_point now = Clock::now();
    if (now >= patience.until) return Waited::kPaused;
    if (now - *waits_since_ < kYieldFor) {
      ::sched_yield();
    } else {
      sleep(peer, ready);
    }
  }
  waits_since_.reset();
  return Waited::kReady;
}

void SharedBoard::announceWait(int peer, uint32_t how) {
  own_->waiting.store(waitingFor(peer, how, ++waits_), std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void SharedBoard::sleep(int peer, const std::function<bool()>& ready) {
  std::atomic<uint32_t>& bell = control(peer).bell;
  const uint32_t seen = bell.load(std::memory_order_acquire);
  sleeps_on_.store(&bell, std::memory_order_seq_cst);
  announceWait(peer, kSleeps);
  if (!ready()) futexWait(&bell, seen);
  disarm();
  sleeps_on_.store(nullptr, std::memory_order_relaxed);
}

void SharedBoard::arm(int peer) {
  announceWait(peer, kArmed);
}

void SharedBoard::disarm() {
  own_->waiting.store(0, std::memory_order_relaxed);
}

// One that comes between over() and the sleep is lost: the sleep ends by itself then.
void SharedBoard::wakeExecutor() {
  const std::atomic<uint32_t>* word = sleeps_on_.load(std::memory_order_seq_cst);
  if (word != nullptr) futexWakeAll(word);
}

}  // namespace torchft_ext
