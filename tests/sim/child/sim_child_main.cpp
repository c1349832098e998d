// The child process of a ProcessGroupBabyNCCL over the simulated device and NCCL.
// TORCHFT_EXT_SIM_FAULTS: lines of faults (sim_faults.h), by ";". What was done wrong in a life
// that ended by a goodbye is appended to the file that TORCHFT_EXT_SIM_VIOLATIONS names.
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "device_child/device_program.h"
#include "sim.h"

namespace {

std::string fromEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace torchft_ext;
  sim::install();
  std::istringstream lines(fromEnvironment("TORCHFT_EXT_SIM_FAULTS"));
  for (std::string line; std::getline(lines, line, ';');) sim::Faults::instance().inject(line);
  const int status = device_child::run("torchft_ext_sim_child", "nccl", argc, argv);
  const auto violations = sim::Faults::instance().violations();
  if (violations.empty()) return status;
  std::ofstream file(fromEnvironment("TORCHFT_EXT_SIM_VIOLATIONS"), std::ios::app);
  for (const std::string& one : violations) file << one << "\n";
  return status;
}
