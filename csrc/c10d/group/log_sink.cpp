#include "c10d/group/log_sink.h"

#include <c10/util/Logging.h>

#include "base/log.h"

namespace torchft_ext {
namespace {

void toTorch(LogLevel level, const std::string& line) {
  switch (level) {
    case LogLevel::kInfo:
      LOG(INFO) << "torchft_ext: " << line;
      return;
    case LogLevel::kWarning:
      LOG(WARNING) << "torchft_ext: " << line;
      return;
    case LogLevel::kError:
      LOG(ERROR) << "torchft_ext: " << line;
      return;
    case LogLevel::kNothing:
      return;
  }
}

}  // namespace

void logThroughTorch() {
  setDefaultLogDestination(&toTorch);
}

}  // namespace torchft_ext
