// The process's pool of threads for callbacks and futures of finished operations (callback_pool.h).
// Created at first use. Progress never depends on it, so user code may block in it; wait() gives it
// a moment, but not to user code (c10d/work/ft_work.cpp).
#pragma once

#include <functional>
#include <memory>

#include "comm/callback_pool.h"
#include "comm/lifecycle.h"

namespace torchft_ext {

// Any thread, never blocks. After stopCallbackThreads() the callback is dropped: false. What it
// throws is logged. whose: the generation that fails where no thread is left to run it; may be
// null.
bool runOnCallbackThread(std::function<void()> callback,
                         const std::shared_ptr<Lifecycle>& whose = nullptr);
// The caller is in a callback.
bool onCallbackThread();
// For how long the present callback has run; zero between callbacks and while all of them wait.
Duration presentCallbackRunsFor();
CallbackPool::Counts callbackThreads();
// At exit, for good: what is queued still runs. False: a callback had not returned by the deadline
// (at once if it is the caller).
bool stopCallbackThreads(Deadline deadline);

}  // namespace torchft_ext
