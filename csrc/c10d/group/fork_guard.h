// The check that a handle is used in the process that made it. Any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace torchft_ext {

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
