// The library's log for programs in C++: where its lines go, and which of them. torchft_ext/c.h has
// the same for C.
//
//   torchft_ext::setLogLevel(torchft_ext::LogLevel::kNothing);   // silence
//   torchft_ext::setLogSink([](torchft_ext::LogLevel level, const std::string& line) {
//     mylog(level, line);
//   });
//
// Without both, a program without Python gets warnings and errors on stderr; in a process with
// Python all lines go through torch's logging, which has a level of its own. A line is one line of
// text without a newline. docs/contract.md says which lines there are.
//
// Threads: both functions from any thread, at any time. They hold for the whole process, and for
// its forked children.
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

// Lines go to this sink, and nowhere else. Empty: as at first. The library calls it on a thread of
// its own, one line at a time; before the first group is made and after the last thread has ended
// on the thread that has something to say. It may block: lines wait meanwhile, a thousand at most.
// A line whose sink throws goes to stderr. The sink must not call the library, which may wait for
// the thread that runs the sink. A call of the previous sink may still be running when this
// returns: keep the objects that a sink refers to until endProcess() has returned true, or for
// ever. The library keeps every sink until the process ends.
void setLogSink(LogSink sink);

// Lines below this level are dropped, whatever the sink. kInfo also has stderr show all.
void setLogLevel(LogLevel least);

}  // namespace torchft_ext
