// The project's log: a line for each generation, each failure, and what an operator has to know
// (a silent peer, a stuck thread, a shortage); silence otherwise. A program chooses a sink and a
// level (torchft_ext/log.h); otherwise lines go where the layer that knows torch has them go, and
// without that warnings and errors go to stderr. Any thread. Never throws: a line that the sink
// throws at goes to stderr.
//
// Whoever reads stderr may have stopped reading. So that a line holds up no thread that finds or
// tells failures, a thread writes them (ft-log) from startLogThread() to stopLogThread(); before
// and after, the caller does.
#pragma once

#include <string>

#include "base/deadline.h"
#include "torchft_ext/log.h"

namespace torchft_ext {

// Where lines go while the program has chosen no sink. nullptr: stderr.
using LogDestination = void (*)(LogLevel, const std::string&);
void setDefaultLogDestination(LogDestination destination);
// With the thread running: never blocks. Lines beyond the thousand that wait are dropped and
// counted; those that wait when a process ends without exit() are lost.
void log(LogLevel level, const std::string& line) noexcept;

// Idempotent. On a thread with the ordinary descriptor table, which the new one shares.
void startLogThread();
// Once what waits is written. False: not by the deadline; from then on nothing is logged any more.
bool stopLogThread(Deadline deadline);

}  // namespace torchft_ext
