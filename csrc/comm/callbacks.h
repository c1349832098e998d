// The one thread on which callbacks and futures of finished operations run. Created at first use.
// Neither wait() nor progress ever depends on it, so user code may block in it.
#pragma once

#include <functional>

#include "base/deadline.h"

namespace torchft_ext {

void runOnCallbackThread(std::function<void()> callback);
bool onCallbackThread();
bool stopCallbackThread(Deadline deadline);  // at exit

}  // namespace torchft_ext
