#include "nccl_host.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <set>
#include <stdexcept>
#include <variant>

#include "cuda_stand_in.h"
#include "diversion.h"
#include "kernel.h"
#include "library_symbols.h"
#include "nccl/nccl_library.h"
#include "sim.h"
#include "sim_faults.h"

namespace torchft_ext::nccl_host {
namespace {

constexpr int kNotSupported = 801;  // cudaErrorNotSupported

int notThere(const char* name) {
  sim::violation(std::string("NCCL called ") + name + ", which is not there");
  return kNotSupported;
}

// Code that calls notThere(name).
class Thunks {
 public:
  explicit Thunks(size_t most) : bytes_(most * kBytes) {
    memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) throw std::runtime_error("no memory for code");
  }
  const void* add(const char* name) {
    auto* at = static_cast<unsigned char*>(memory_) + used_;
    used_ += kBytes;
    const auto target = reinterpret_cast<uintptr_t>(&notThere);
    unsigned char code[kBytes] = {0x48, 0xbf, 0, 0, 0, 0, 0, 0, 0, 0,  // mov $name, %rdi
                                  0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0,  // mov $target, %rax
                                  0xff, 0xe0};                         // jmp *%rax
    std::memcpy(code + 2, static_cast<const void*>(&name), sizeof name);
    std::memcpy(code + 12, &target, sizeof target);
    std::memcpy(at, code, kBytes);
    return at;
  }
  void finish() {
    if (::mprotect(memory_, bytes_, PROT_READ | PROT_EXEC) != 0)
      throw std::runtime_error("code may not be run here");
  }

 private:
  static constexpr size_t kBytes = 22;
  const size_t bytes_;
  void* memory_ = nullptr;
  size_t used_ = 0;
};

void divertAll(const LibrarySymbols& symbols) {
  std::set<std::string> done;
  const auto divertTo = [&](const StandIn& stand_in) {
    if (void* theirs = symbols.find(stand_in.name)) divert(theirs, stand_in.function);
    done.insert(stand_in.name);
  };
  for (const StandIn& each : cudaRuntime()) divertTo(each);
  for (const StandIn& each : cudaGraphs()) divertTo(each);
  for (const StandIn& each : nvml()) divertTo(each);
  const auto runtime = symbols.beginningWith("cuda");
  auto* const thunks = new Thunks(runtime.size());  // as long as the process
  for (const auto& [name, theirs] : runtime) {
    if (name.size() < 5 || name[4] < 'A' || name[4] > 'Z' || done.count(name) != 0) continue;
    divert(theirs, thunks->add(::strdup(name.c_str())));
  }
  thunks->finish();
}

std::shared_ptr<const NcclPlatform> openOnce() {
  const char* path = std::getenv("TORCHFT_EXT_NCCL_LIB");
  if (path == nullptr) throw std::runtime_error("TORCHFT_EXT_NCCL_LIB names no NCCL");
  void* handle = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error(::dlerror());
  auto* const symbols = new LibrarySymbols(handle);  // as long as the process
  setLibrary(symbols);
  divertAll(*symbols);
  auto nccl = loadNcclLibrary();
  if (const auto* why = std::get_if<std::string>(&nccl)) throw std::runtime_error(*why);
  auto platform = std::make_shared<NcclPlatform>(*sim::platform());
  platform->nccl = std::get<std::shared_ptr<NcclApi>>(nccl);
  return platform;
}

}  // namespace

std::shared_ptr<const NcclPlatform> open() {
  static const std::shared_ptr<const NcclPlatform> platform = openOnce();
  return platform;
}

TORCH_LIBRARY(torchft_ext_nccl_host, m) {
  m.def("install() -> ()", [] { setNcclPlatformForTest(open()); });
  m.def("live_allocations() -> int", [] { return static_cast<int64_t>(liveAllocations()); });
}

}  // namespace torchft_ext::nccl_host
