// Processes that a test starts, and that end with it at the latest.
#pragma once

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>

#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"

extern char** environ;  // NOLINT(readability-redundant-declaration): not in every libc's header

namespace torchft_ext {

class Processes {
 public:
  ~Processes() {
    for (const pid_t pid : pids_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  Processes() = default;
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  void start(std::vector<std::string> words) {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_t pid = -1;
    ASSERT_EQ(::posix_spawn(&pid, argv[0], nullptr, nullptr, argv.data(), environ), 0);
    pids_.push_back(pid);
  }
  // All have ended well. Who has failed is not waited for by the others.
  bool endWell(Deadline deadline) {
    while (!pids_.empty() && !deadline.expired()) {
      int status = 0;
      const pid_t ended = ::waitpid(pids_.back(), &status, WNOHANG);
      if (ended == 0) {
        std::this_thread::sleep_for(milliseconds(5));
        continue;
      }
      pids_.pop_back();
      if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return false;
    }
    return pids_.empty();
  }

 private:
  std::vector<pid_t> pids_;
};

}  // namespace torchft_ext
