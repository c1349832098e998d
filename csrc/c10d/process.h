// What belongs to the process and not to a group: the watchdog, the list of groups that say goodbye
// at exit, and the check that a handle is used in the process that made it. Any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/deadline.h"

namespace torchft_ext {

class Group;
class Watchdog;

std::shared_ptr<Watchdog> sharedWatchdog();

// Known groups are shut down by processExit(). Holds no group alive.
void rememberGroup(const std::shared_ptr<Group>& group);

// Fails every generation that has unfinished operations, so that whoever waits for them is
// released. how: the cause that the error gives. Does not wait.
void failOutstanding(const std::string& how);

// Says goodbye for every group and ends all threads of the library, by the deadline; what does not
// end is abandoned and reported. False: something was abandoned. In a forked child: for what was
// made there. exit() calls it, with a second's time, wherever a watchdog was made.
bool processExit(Deadline deadline);

// Descriptors open in this process, those in tables that threads of the library have to themselves
// included.
int openDescriptors();

// A handle made before fork() does not work in the child: its threads are not there.
class ForkGuard {
 public:
  ForkGuard();
  bool inherited() const;
  // RuntimeError in a forked child. what: "this process group".
  void check(const char* what) const;

 private:
  pid_t pid_;
  uint64_t fork_count_;
};

}  // namespace torchft_ext
