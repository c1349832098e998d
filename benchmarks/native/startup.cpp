#include "startup.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

#include "processes.h"

namespace torchft_ext::bench {
namespace {

int64_t now() {  // nanoseconds
  return std::chrono::nanoseconds(BenchClock::now().time_since_epoch()).count();
}

long peakMemory() {  // KiB
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stol(line.substr(6));
  }
  throw std::runtime_error("/proc/self/status has no VmHWM");
}

}  // namespace

Row measureStartup(const Member& member) {
  Row row;
  row.op = "startup";
  long peak = 0;
  for (int i = 0; i < member.arguments.rounds && member.rank == 0; ++i) {
    Arguments arguments;
    arguments.role = "alone";
    const int64_t began = now();
    Process process(arguments, true);
    int64_t summed = 0;
    long memory = 0;
    std::istringstream told(process.readLine());
    if (!(told >> summed >> memory) || !process.wait()) {
      throw std::runtime_error("a process alone has failed");
    }
    row.times.push_back(static_cast<double>(summed - began) / 1e3);
    peak = std::max(peak, memory);
  }
  row.more = {{"peak_mib", static_cast<double>(peak) / 1024}};
  member.comm.barrier().wait();
  return row;
}

void beAlone() {
  Comm comm;
  comm.configure(makeMemoryStore(), "alone", 0, 1);
  float value = 1;
  comm.allreduce(&value, 1, DataType::kFloat32, Reduction::kSum).wait();
  std::printf("%lld %ld\n", static_cast<long long>(now()), peakMemory());
}

}  // namespace torchft_ext::bench
