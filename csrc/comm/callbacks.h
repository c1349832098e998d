// The one thread on which callbacks and futures of finished operations run. Created at first use.
// Progress never depends on it, so user code may block in it; wait() gives it a moment, but not to
// user code (c10d/ft_work.cpp).
#pragma once

#include <functional>

#include "base/deadline.h"

namespace torchft_ext {

// Any thread, never blocks. After stopCallbackThread() the callback is dropped: false. What it
// throws is logged.
bool runOnCallbackThread(std::function<void()> callback);
bool onCallbackThread();
// For how long the present callback has run; zero between callbacks.
Duration presentCallbackRunsFor();
// At exit, for good: what is queued still runs. False: a callback had not returned by the deadline
// (at once if it is the caller).
bool stopCallbackThread(Deadline deadline);

}  // namespace torchft_ext
