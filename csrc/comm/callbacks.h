// The one thread on which callbacks and futures of finished operations run. Created at first use.
// Neither wait() nor progress ever depends on it, so user code may block in it.
#pragma once

#include <functional>

#include "base/deadline.h"

namespace torchft_ext {

// Any thread, never blocks. After stopCallbackThread() the callback is dropped. What it throws is
// logged.
void runOnCallbackThread(std::function<void()> callback);
bool onCallbackThread();
// At exit, for good: what is queued still runs. False: a callback had not returned by the deadline
// (at once if it is the caller).
bool stopCallbackThread(Deadline deadline);

}  // namespace torchft_ext
