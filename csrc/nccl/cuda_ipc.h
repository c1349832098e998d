// CUDA's memory and events between processes, by the runtime that torch loaded and the driver under
// it, found at run time. No cuda.h: tests/nccl/cuda_declarations.cpp compares what is declared here
// with CUDA's headers.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <variant>

#include "device/device_ipc.h"
#include "nccl/nccl_types.h"

namespace torchft_ext {

// cudaIpcMemHandle_t and cudaIpcEventHandle_t.
struct CudaIpcHandle {
  std::array<char, 64> reserved{};
};

constexpr unsigned kCudaEventDisableTiming = 2;
constexpr unsigned kCudaEventInterprocess = 4;
constexpr unsigned kCudaLazyEnablePeerAccess = 1;  // cudaIpcMemLazyEnablePeerAccess

// Functions of libcudart, and one of libcuda, by their names without "cuda" and "cu". Status and
// flags are their ints; streams and events are pointers.
struct CudaIpcEntryPoints {
  int (*IpcGetMemHandle)(CudaIpcHandle*, void*) = nullptr;
  int (*IpcOpenMemHandle)(void**, CudaIpcHandle, unsigned) = nullptr;
  int (*IpcCloseMemHandle)(void*) = nullptr;
  int (*IpcGetEventHandle)(CudaIpcHandle*, void*) = nullptr;
  int (*IpcOpenEventHandle)(void**, CudaIpcHandle) = nullptr;
  int (*EventCreateWithFlags)(void**, unsigned) = nullptr;
  int (*EventRecord)(void*, NativeStream) = nullptr;
  int (*EventDestroy)(void*) = nullptr;
  int (*StreamWaitEvent)(NativeStream, void*, unsigned) = nullptr;
  int (*StreamIsCapturing)(NativeStream, int*) = nullptr;
  int (*SetDevice)(int) = nullptr;
  int (*GetLastError)() = nullptr;
  const char* (*GetErrorString)(int) = nullptr;
  int (*MemGetAddressRange)(uintptr_t*, size_t*, uintptr_t) = nullptr;
};

// library: through which the runtime's functions are found. stream_of: gives the native handle of a
// c10 stream. Or what lacks.
std::variant<std::shared_ptr<DeviceIpc>, std::string> loadCudaIpc(
    void* library, NativeStream (*stream_of)(const c10::Stream*));

}  // namespace torchft_ext
