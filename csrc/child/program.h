// What the programs of child processes have in common: descriptors, signals, exit status.
//
//   NAME PARENT
//
// Descriptor 3 is the socket to the parent, whose process id is PARENT; those that follow are the
// program's own. Exit status: 0 after a goodbye, or without a parent; 2: started otherwise; 3: what
// the parent sent makes no sense, or cannot be had here. Why is on stderr.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>

#include "child/served_engine.h"

namespace torchft_ext::child {

constexpr int kSocket = 3;
constexpr int kArena = 4;

struct Program {
  const char* name;
  int last_descriptor;  // that it is started with
  // Made once the descriptors are in order. May throw std::exception.
  std::function<std::unique_ptr<ServedEngine>(pid_t parent)> engine;
};

// main() of such a program: what it returns is the exit status. Main thread; blocks until the
// parent says goodbye or is gone.
int run(const Program& program, int argc, char** argv);

}  // namespace torchft_ext::child
