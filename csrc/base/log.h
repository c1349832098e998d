// The project's log: one line for each epoch and each failure, silence otherwise. The layer that
// knows torch installs a sink; until then warnings and errors go to stderr. Any thread. Never
// throws: a line that the sink throws at goes to stderr.
#pragma once

#include <string>

namespace torchft_ext {

enum class LogLevel { kInfo, kWarning, kError };
using LogSink = void (*)(LogLevel, const std::string&);

void setLogSink(LogSink sink);  // nullptr restores stderr
void log(LogLevel level, const std::string& line) noexcept;

}  // namespace torchft_ext
