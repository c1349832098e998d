#include "c10d/group/abort_hooks.h"

#include "comm/callbacks.h"

namespace torchft_ext {

void AbortHooks::call() {
  if (hooks_.empty()) return;
  runOnCallbackThread([self = shared_from_this()] { self->hooks_.call(); });
}

}  // namespace torchft_ext
