#include "c10d/group/fork_guard.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include "base/fork.h"

namespace torchft_ext {

ForkGuard::ForkGuard() : pid_(::getpid()), fork_count_(forkCount()) {}

bool ForkGuard::inherited() const {
  return forkCount() != fork_count_;
}

void ForkGuard::check(const char* what) const {
  TORCH_CHECK(!inherited(), what, " was made before fork(), in process ", pid_,
              ", and cannot be used in process ", ::getpid(),
              "; start workers with the 'spawn' method and make it there");
}

}  // namespace torchft_ext
