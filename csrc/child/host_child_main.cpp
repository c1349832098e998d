// The child process of a ProcessGroupBabyHost: the CPU engine, beside a program that may kill it.
// program.h says how it is started. Descriptor 4 is the shared memory.
#include "child/host_served.h"
#include "child/program.h"

int main(int argc, char** argv) {
  using namespace torchft_ext;
  const auto engine = [](pid_t /*parent*/) {
    return std::make_unique<child::HostServed>(UniqueFd(child::kArena));
  };
  return child::run({"torchft_ext_host_child", child::kArena, engine}, argc, argv);
}
