// What train.cpp and serve.cpp share, none of which is about torchft_ext: words of the command
// line, processes of the same program, and the place where these meet and report.
#pragma once

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

namespace example {

using Arguments = std::map<std::string, std::string>;  // --name value

// A store on this host, and a directory that goes with this object.
class Meeting {
 public:
  Meeting() {
    if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("no directory for reports");
    c10d::TCPStoreOptions options;
    options.port = 0;  // any that is free
    options.isServer = true;
    options.waitWorkers = false;
    store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  ~Meeting() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  std::string address(const std::string& job) const {
    return "127.0.0.1:" + std::to_string(store_->getPort()) + "/" + job;
  }
  const std::string& directory() const { return path_; }

 private:
  std::string path_ = "/tmp/torchft_ext-example-XXXXXX";
  c10::intrusive_ptr<c10d::TCPStore> store_;
};

// This program once more, with the arguments. It ends with this process at the latest.
inline pid_t start(const Arguments& arguments) {
  std::vector<std::string> words{"/proc/self/exe"};
  for (const auto& [name, value] : arguments) words.insert(words.end(), {"--" + name, value});
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::execv(argv[0], argv.data());
  std::_Exit(127);
}

inline bool wasKilled(int status) {
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

struct Program {
  std::string name;
  std::string usage;
  Arguments arguments;                        // the defaults
  int (*launch)(const Arguments& arguments);  // starts workers; returns the exit status
  void (*work)(const Arguments& arguments);   // a worker: who was started with --worker
};

inline int run(Program program, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--", 0) != 0 || word == "--help" || i + 1 == argc) {
      std::cerr << "usage: " << program.name << " " << program.usage << "\n";
      return word == "--help" ? 0 : 2;
    }
    program.arguments[word.substr(2)] = argv[++i];
  }
  try {
    if (!program.arguments.count("worker")) {
      ::setenv("OMP_NUM_THREADS", "1", 0);
      return program.launch(program.arguments);
    }
    program.work(program.arguments);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << program.name << ": " << error.what() << "\n";
    return 1;
  }
}

}  // namespace example
