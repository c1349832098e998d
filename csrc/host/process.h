// What belongs to the process and not to a group: the watchdog, the list of groups that say goodbye
// at exit, and the end of all threads of the library. Any thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"

namespace torchft_ext {

class Group;
class Watchdog;

std::shared_ptr<Watchdog> sharedWatchdog();

// exit() calls processExit() also ahead of what was loaded since sharedWatchdog() was first called:
// the runtime of a device, which must be there when its groups leave. Again: nothing.
void leaveAheadAtExit();

// Known groups are shut down by processExit(), and can be counted. Holds no group alive.
void rememberGroup(const std::shared_ptr<Group>& group);
// Those that live, in the order in which they were made; after processExit() none.
std::vector<std::shared_ptr<Group>> knownGroups();

// Fails every generation that has unfinished operations, so that whoever waits for them is
// released. how: the cause that the error gives. Does not wait.
void failOutstanding(const std::string& how);

// Of an engine above this layer: ends its threads, after the goodbyes and before the host engines'.
// False: one did not end by the deadline. Called by processExit(), each time. For the process.
using ExitStep = bool (*)(Deadline deadline);
void addExitStep(ExitStep step);

// Says goodbye for every group and ends all threads of the library, by the deadline; what does not
// end is abandoned and reported. False: something was abandoned. In a forked child: for what was
// made there. exit() calls it, with a second's time, wherever a watchdog was made.
bool processExit(Deadline deadline);

// Descriptors open in this process, those in tables that threads of the library have to themselves
// included.
int openDescriptors();

}  // namespace torchft_ext
