#include "nccl/cuda_runtime.h"

#include <dlfcn.h>

#include "nccl/cuda_ipc.h"

namespace torchft_ext {
namespace {

constexpr int kCaptureStatusNone = 0;   // cudaStreamCaptureStatusNone
constexpr int kCaptureModeRelaxed = 2;  // cudaStreamCaptureModeRelaxed

// c10::cuda::CUDAStream::stream() const. The virtual
// DeviceGuardImplInterface::getStreamNativeHandle does not exist in every supported torch, the
// encoding of a StreamId is private to libc10_cuda, and CUDAStream.h needs CUDA's headers. This
// member function has been exported by libc10_cuda since torch 1.1, and a CUDAStream is nothing but
// a c10::Stream, so its address is the `this` it wants.
constexpr const char* kStreamOf = "_ZNK3c104cuda10CUDAStream6streamEv";

struct EntryPoints {
  NativeStream (*stream_of)(const c10::Stream*) = nullptr;
  int (*is_capturing)(NativeStream, int*) = nullptr;
  int (*exchange_capture_mode)(int*) = nullptr;
  int (*take_error)() = nullptr;
};

class CudaRuntime : public CudaApi {
 public:
  CudaRuntime(void* library, const EntryPoints& entry) : library_(library), entry_(entry) {}

  NativeStream native(const c10::Stream& stream) const override {
    return entry_.stream_of(&stream);
  }

  bool capturing(const c10::Stream& stream) const override {
    int status = kCaptureStatusNone;
    if (entry_.is_capturing(native(stream), &status) == 0) return status != kCaptureStatusNone;
    entry_.take_error();  // else the next check of a kernel launch, of anyone's, would find it
    return false;
  }

  std::unique_ptr<RelaxedCapture> relaxCapture() const override {
    class Exchanged : public RelaxedCapture {
     public:
      explicit Exchanged(int (*exchange)(int*)) : exchange_(exchange) { exchange_(&mode_); }
      Exchanged(const Exchanged&) = delete;
      Exchanged& operator=(const Exchanged&) = delete;
      ~Exchanged() override { exchange_(&mode_); }

     private:
      int (*exchange_)(int*);
      int mode_ = kCaptureModeRelaxed;  // then the one before
    };
    return std::make_unique<Exchanged>(entry_.exchange_capture_mode);
  }

  std::variant<std::shared_ptr<DeviceIpc>, std::string> ipc() const override {
    return loadCudaIpc(library_, entry_.stream_of);
  }

 private:
  void* const library_;  // never closed
  const EntryPoints entry_;
};

}  // namespace

std::variant<std::shared_ptr<CudaApi>, std::string> loadCudaRuntime() {
  // A look-up through this handle also finds what the library depends on: the very libcudart that
  // torch uses, whatever its version.
  void* library = ::dlopen("libc10_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return std::string("this torch was built without CUDA");
  EntryPoints entry;
  entry.stream_of = reinterpret_cast<decltype(entry.stream_of)>(::dlsym(library, kStreamOf));
  entry.is_capturing =
      reinterpret_cast<decltype(entry.is_capturing)>(::dlsym(library, "cudaStreamIsCapturing"));
  entry.exchange_capture_mode = reinterpret_cast<decltype(entry.exchange_capture_mode)>(
      ::dlsym(library, "cudaThreadExchangeStreamCaptureMode"));
  entry.take_error =
      reinterpret_cast<decltype(entry.take_error)>(::dlsym(library, "cudaGetLastError"));
  if (entry.stream_of == nullptr || entry.is_capturing == nullptr ||
      entry.exchange_capture_mode == nullptr || entry.take_error == nullptr) {
    return std::string(
        "torch's libc10_cuda.so, or the CUDA runtime under it, lacks CUDAStream::stream(), "
        "cudaStreamIsCapturing, cudaThreadExchangeStreamCaptureMode or cudaGetLastError");
  }
  return std::make_shared<CudaRuntime>(library, entry);
}

}  // namespace torchft_ext
