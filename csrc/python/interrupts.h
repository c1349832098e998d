// Ctrl-C while the main thread sits in a wait that is not ours: DDP's backward and Future.wait()
// wait inside torch, where nobody looks at signals.
//
// Python writes the number of each signal that it has caught to its wakeup descriptor. ft-signals
// reads it and asks, by a pending call, whether the main thread runs Python: then it raises
// KeyboardInterrupt by itself. If it has not answered after 250 ms, and SIGINT still has Python's
// own handler, the generations with unfinished operations fail: the wait ends, and Python raises.
//
// Owner: the process; started at most once, and anew in a forked child. Threads: any. ft-signals
// takes the GIL for the look at the handler alone. After the stop the descriptors stay open, since
// somebody may put them back.
#pragma once

#include "base/deadline.h"

namespace torchft_ext {

// The descriptor for signal.set_wakeup_fd(). -1: the process is ending. RuntimeError where no pipe
// or thread can be had. The same one each time.
int interruptPipe();
// For good. False: the thread had not ended by the deadline, and was abandoned.
bool stopInterruptWatch(Deadline deadline);

}  // namespace torchft_ext
