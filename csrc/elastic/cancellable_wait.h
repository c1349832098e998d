// How a caller's thread waits for what another thread will bring about.
#pragma once

#include <functional>

#include "base/deadline.h"
#include "base/mutex.h"

namespace torchft_ext {

// Called every few milliseconds on the waiting thread, without a lock: true, or what it throws,
// ends the wait. Empty: never.
using Cancelled = std::function<bool()>;

// Returns once done() holds, at the deadline, or once cancelled() says so. done() is called with
// the mutex held; what throws in cancelled() comes out with the mutex held.
void waitUntilDone(Mutex& mutex, CondVar& changed, const std::function<bool()>& done,
                   Deadline deadline, const Cancelled& cancelled) REQUIRES(mutex);

}  // namespace torchft_ext
