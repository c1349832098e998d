// What ft_bench and shm_limit are asked for on their command lines.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace torchft_ext::bench {

// A value. What is only for the processes that ft_bench starts is not in the help.
struct Arguments {
  int world = 4;
  std::string op = "allreduce";  // or several: "allreduce,barrier"; or "all"
  size_t min = 4;                // bytes
  size_t max = size_t{64} << 20;
  size_t factor = 4;
  double seconds = 0.3;  // for each size
  int rounds = 20;       // of what is not timed for some seconds
  bool tcp = false;

  std::string role;       // of a process that ft_bench starts: rank, victim, alone
  int rank = -1;          // of a rank or victim
  std::string directory;  // of the store
  std::string prefix;     // of a victim's generation
};

// Throws std::invalid_argument: an unknown name, or a value that is none.
Arguments parseArguments(const std::vector<std::string>& words);
// What parseArguments() makes the same of.
std::vector<std::string> wordsOf(const Arguments& arguments);
// "a,b" are a and b; "all" are all of these. Throws std::invalid_argument for any other name.
std::vector<std::string> chosenOps(const std::string& op, const std::vector<std::string>& all);
// min, min * factor, ..., max.
std::vector<size_t> sizesOf(const Arguments& arguments);

}  // namespace torchft_ext::bench
