// Processes of the benchmark's own program.
#pragma once

#include <sys/types.h>

#include <string>

#include "arguments.h"

namespace torchft_ext::bench {

// One process, with arguments of its own. Owner: whoever started it; the destructor kills and reaps
// it, and it does not outlive the thread that started it. Threads: that one.
class Process {
 public:
  // told: what it prints can be read by readLine(); else it goes where this process's goes.
  // Throws std::system_error.
  explicit Process(const Arguments& arguments, bool told = false);
  ~Process();
  Process(Process&& other) noexcept;
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  Process& operator=(Process&&) = delete;

  void kill() const;       // SIGKILL
  bool wait();             // until it ends; true: with 0
  std::string readLine();  // blocks; without the end of the line, empty: it has ended

 private:
  pid_t pid_ = -1;  // -1: reaped, or moved from
  int output_ = -1;
};

}  // namespace torchft_ext::bench
