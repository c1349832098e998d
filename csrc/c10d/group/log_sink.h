// Sends the library's log lines to torch's logging, at the same levels. Once per process; any
// thread.
#pragma once

namespace torchft_ext {

void logThroughTorch();

}  // namespace torchft_ext
