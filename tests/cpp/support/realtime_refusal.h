// Whether threads of this process may be realtime ones.
#pragma once

#include <sched.h>

#include <cerrno>
#include <thread>

namespace torchft_ext {

// Why a thread of this process may not be realtime: the error's number, 0 if it may.
inline int refusalOfRealtime() {
  int refusal = 0;
  std::thread([&refusal] {
    sched_param lowest{};
    lowest.sched_priority = ::sched_get_priority_min(SCHED_FIFO);
    if (::sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &lowest) != 0) refusal = errno;
  }).join();
  return refusal;
}

}  // namespace torchft_ext
