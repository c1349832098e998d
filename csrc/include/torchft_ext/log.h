// The library's log, for programs in C++: where its lines go, and which lines there are.
// torchft_ext/c.h offers the same to C programs.
//
//   torchft_ext::setLogLevel(torchft_ext::LogLevel::kNothing);   // silence
//   torchft_ext::setLogSink([](torchft_ext::LogLevel level, const std::string& line) {
//     mylog(level, line);
//   });
//
// By default, a program without Python gets warnings and errors on stderr. In a process with Python
// all lines go through torch's logging, which has its own level. A line is one line of text without
// a newline. docs/contract.md lists the lines.
//
// Threads: both functions from any thread, at any time. They apply to the whole process, and to its
// forked children.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace torchft_ext {

// Numbers are those of the C interface: append only.
enum class LogLevel : uint8_t {
  kInfo = 0,
  kWarning = 1,
  kError = 2,
  kNothing = 3,  // of setLogLevel(): no line has it
};

using LogSink = std::function<void(LogLevel, const std::string&)>;

// Lines go to this sink only. An empty sink restores the default. The library calls the sink on a
// thread of its own, one line at a time. Before the first group is made, and after the library's
// threads have ended, it calls the sink on the thread that logs. The sink may block; up to a
// thousand lines wait meanwhile. If the sink throws, the line goes to stderr. The sink must not
// call the library, which may wait for the thread that runs the sink. A call of the previous sink
// may still be running when this function returns. So keep the objects that a sink refers to until
// endProcess() has returned true, or for ever. The library keeps every sink until the process ends.
void setLogSink(LogSink sink);

// Lines below this level are dropped, whatever the sink is. With kInfo, stderr too shows all lines.
void setLogLevel(LogLevel least);

}  // namespace torchft_ext
