// The project's log: a line for each generation, each failure, and what an operator has to know
// (a silent peer, a stuck thread, a shortage); silence otherwise. The layer that knows torch
// installs a sink; until then warnings and errors go to stderr. Any thread. Never throws: a line
// that the sink throws at goes to stderr.
//
// Whoever reads stderr may have stopped reading. So that a line holds up no thread that finds or
// tells failures, a thread writes them (ft-log) from startLogThread() to stopLogThread(); before
// and after, the caller does.
#pragma once

#include <string>

#include "base/deadline.h"

namespace torchft_ext {

enum class LogLevel { kInfo, kWarning, kError };
using LogSink = void (*)(LogLevel, const std::string&);

void setLogSink(LogSink sink);  // nullptr restores stderr
// With the thread running: never blocks. Lines beyond the thousand that wait are dropped and
// counted; those that wait when a process ends without exit() are lost.
void log(LogLevel level, const std::string& line) noexcept;

// Idempotent. On a thread with the ordinary descriptor table, which the new one shares.
void startLogThread();
// Once what waits is written. False: not by the deadline; from then on nothing is logged any more.
bool stopLogThread(Deadline deadline);

}  // namespace torchft_ext
