// Which ranks of a generation are members of one process, so that the loss of one names the others:
// the process's end is theirs too. Constant after construction: any thread.
#pragma once

#include <map>
#include <string>

#include "membership/records.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

class SharedProcesses {
 public:
  explicit SharedProcesses(const Roster& roster);

  // To the cause of a lost rank: "; rank 3 was the same process". Once, however often it is called.
  void nameIn(Failure& failure) const;

 private:
  std::map<int, std::string> others_;  // by rank; empty as a rule: each rank is a process
};

}  // namespace torchft_ext
