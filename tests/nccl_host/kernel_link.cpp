#include "kernel_link.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace torchft_ext::nccl_host {
namespace {

uint64_t load(const uint64_t* counter) {
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}
void store(uint64_t* counter, uint64_t value) {
  __atomic_store_n(counter, value, __ATOMIC_RELEASE);
}

// Until the counter, and `ahead` steps more, are at `least`; a proxy's begins at -kSteps, so that
// nothing is sent before it has said where to. A device spins; here others need the core.
void await(const uint64_t* counter, uint64_t ahead, uint64_t least,
           const volatile uint32_t* abort_flag) {
  constexpr int kEager = 100;
  for (int looks = 0; load(counter) + ahead < least; ++looks) {
    if (*abort_flag != 0) throw Aborted();
    if (looks < kEager) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(looks < 10 * kEager ? 20 : 200));
    }
  }
  if (*abort_flag != 0) throw Aborted();
}

uint64_t roundedUp(uint64_t step, const Steps& steps) {
  const uint64_t whole = steps.per_slice * steps.slices;
  return (step + whole - 1) / whole * whole;
}

char* place(Connection& connection, uint64_t step) {
  char* const first = connection.buffers[kSimple];
  if (connection.slots != nullptr) {
    const StepSlot& slot = connection.slots[step % kSteps];
    if (slot.mode == kOffsetMode) return first + __atomic_load_n(&slot.offset, __ATOMIC_RELAXED);
  }
  return first + (step % kSteps) * static_cast<uint64_t>(connection.step_bytes);
}

void tellSize(Connection& connection, uint64_t step, size_t bytes) {
  if (connection.slots != nullptr)
    __atomic_store_n(&connection.slots[step % kSteps].size, static_cast<ssize_t>(bytes),
                     __ATOMIC_RELAXED);
}

}  // namespace

Link::Link(Connection& connection, Steps steps, const volatile uint32_t* abort_flag)
    : connection_(connection),
      step_(roundedUp(connection.step, steps)),
      steps_(steps),
      abort_flag_(abort_flag) {}

Link::~Link() {
  connection_.step = step_;
}

char* Link::wait(const uint64_t* counter, uint64_t ahead, size_t bytes) {
  await(counter, ahead, step_ + steps_.per_slice, abort_flag_);
  tellSize(connection_, step_, bytes);
  return place(connection_, step_);
}

void Link::post(uint64_t* counter) {
  step_ += steps_.per_slice;
  store(counter, step_);
}

RecvLink::RecvLink(Connection& connection, Steps steps, const volatile uint32_t* abort_flag)
    : Link(connection, steps, abort_flag) {
  store(connection_.head, step_);  // credits for the steps that were rounded over
}

}  // namespace torchft_ext::nccl_host
