#include "base/log.h"

#include <atomic>
#include <cstdio>

namespace torchft_ext {
namespace {

std::atomic<LogSink> current_sink{nullptr};

void writeToStderr(LogLevel level, const std::string& line) {
  if (level == LogLevel::kInfo) return;
  const char* name = level == LogLevel::kWarning ? "warning" : "error";
  std::fprintf(stderr, "torchft_ext %s: %s\n", name, line.c_str());
}

}  // namespace

void setLogSink(LogSink sink) {
  current_sink.store(sink);
}

void log(LogLevel level, const std::string& line) noexcept {
  try {
    const LogSink sink = current_sink.load();
    if (sink != nullptr) {
      sink(level, line);
    } else {
      writeToStderr(level, line);
    }
  } catch (...) {
    writeToStderr(LogLevel::kError, line);  // the sink failed: the line must not be lost with it
  }
}

}  // namespace torchft_ext
