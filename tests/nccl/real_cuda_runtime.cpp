// Loads the CUDA runtime under a real torch's libc10_cuda, as the engine does, and asks for the
// native handle of the default stream: without a GPU CUDA itself refuses that, with one there is no
// handle. Also looks for what lends memory, of which only the driver may be missing.
//   real_cuda_runtime PATH      of libc10_cuda.so
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <iostream>
#include <string>

#include "nccl/cuda_runtime.h"

namespace torchft_ext {
namespace {

int fail(const std::string& why) {
  std::cerr << why << "\n";
  return 1;
}

std::string reasonOf(const decltype(loadCudaRuntime())& loaded) {
  const auto* why = std::get_if<std::string>(&loaded);
  return why == nullptr ? "" : *why;
}

// Empty: it was found, as far as this machine has it.
std::string problemOfLending(const CudaApi& cuda) {
  const auto lent = cuda.ipc();
  const auto* why = std::get_if<std::string>(&lent);
  if (why == nullptr || why->find("no CUDA driver") != std::string::npos) return "";
  return *why;
}

int run(const char* path) {
  if (reasonOf(loadCudaRuntime()).find("built without CUDA") == std::string::npos)
    return fail("expected: no CUDA runtime before torch has loaded one");
  if (::dlopen(path, RTLD_NOW | RTLD_LOCAL) == nullptr) return fail(::dlerror());
  const auto loaded = loadCudaRuntime();
  if (!reasonOf(loaded).empty()) return fail(reasonOf(loaded));
  const CudaApi& cuda = *std::get<std::shared_ptr<CudaApi>>(loaded);
  const auto relaxed = cuda.relaxCapture();
  if (const std::string problem = problemOfLending(cuda); !problem.empty()) return fail(problem);
  const c10::Stream stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CUDA, 0));
  std::string default_stream;
  try {
    if (cuda.native(stream) != nullptr) return fail("expected: no handle of the default stream");
    if (cuda.capturing(stream)) return fail("expected: no capture");
    default_stream = "has no handle";
  } catch (const c10::Error& error) {
    if (std::string(error.what()).find("CUDA") == std::string::npos) return fail(error.what());
    default_stream = "refused by CUDA";
  }
  std::cout << "CUDA runtime found under " << path << "; the default stream: " << default_stream
            << std::endl;
  return 0;
}

}  // namespace
}  // namespace torchft_ext

int main(int count, char** arguments) {
  if (count != 2) {
    std::cerr << "usage: real_cuda_runtime PATH of libc10_cuda.so\n";
    return 2;
  }
  return torchft_ext::run(arguments[1]);
}
