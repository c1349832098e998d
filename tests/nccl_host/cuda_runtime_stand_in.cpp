// The functions of the CUDA runtime but for graphs. Each has the signature of CUDA's own header,
// which the table at the end checks.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>

#include "base/mutex.h"
#include "cuda_handles.h"
#include "cuda_stand_in.h"
#include "device_memory.h"
#include "kernel.h"
#include "sim_device.h"
#include "sim_faults.h"

namespace torchft_ext::nccl_host {
namespace {

using sim::SimEvent;
using sim::SimStream;

constexpr int kCudaVersion = 13000;

// ---- streams that NCCL makes for itself: given back to be used again, as a stream's thread is for
// good

class OwnStreams {
 public:
  static OwnStreams& instance() {
    static auto* const streams = new OwnStreams;
    return *streams;
  }
  SimStream* take() {
    MutexLock lock(mutex_);
    for (auto each = idle_.begin(); each != idle_.end(); ++each) {
      SimStream* stream = *each;
      if (!stream->idle() || stream->capture() != nullptr) continue;
      idle_.erase(each);
      return stream;
    }
    return new SimStream(sim::currentDevice(), kFirstId + made_++);
  }
  void giveBack(SimStream* stream) {
    MutexLock lock(mutex_);
    idle_.push_back(stream);
  }

 private:
  static constexpr int64_t kFirstId = 1000;
  Mutex mutex_;
  std::deque<SimStream*> idle_ GUARDED_BY(mutex_);
  int64_t made_ GUARDED_BY(mutex_) = 0;
};

// ---- devices

cudaError_t cudaGetDevice(int* device) {
  *device = sim::currentDevice();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= sim::deviceCount()) return failed(cudaErrorInvalidDevice);
  sim::setCurrentDevice(device);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = sim::deviceCount();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "simulated");
  properties->major = 9;
  properties->multiProcessorCount = 16;
  properties->unifiedAddressing = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 16;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 * 1024;
      break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* out, int length, int device) {
  std::snprintf(out, static_cast<size_t>(length), "0000:%02x:00.0", 0x40 + device);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int, int) {
  *value = 0;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = kCudaVersion;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kCudaVersion;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{16} << 30;
  return cudaSuccess;
}

// ---- errors

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error of the simulated CUDA";
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "cudaError of the simulated CUDA";
}
cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return last_error;
}

// ---- the driver's functions

cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* status) {
  *function = const_cast<void*>(driverFunction(name));
  if (status != nullptr)
    *status =
        *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* status) {
  return nccl_host::cudaGetDriverEntryPoint(name, function, flags, status);
}

// ---- memory

cudaError_t allocate(void** memory, size_t bytes) {
  *memory = DeviceMemory::instance().allocate(bytes);
  return *memory == nullptr ? failed(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t release(void* memory) {
  if (memory == nullptr || DeviceMemory::instance().release(memory)) return cudaSuccess;
  sim::violation("NCCL freed memory that it has not");
  return failed(cudaErrorInvalidValue);
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  notInCapture("cudaMalloc");
  return allocate(memory, bytes);
}
cudaError_t cudaFree(void* memory) {
  notInCapture("cudaFree");
  return release(memory);
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned int) {
  notInCapture("cudaHostAlloc");
  return allocate(memory, bytes);
}
cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  notInCapture("cudaMallocHost");
  return allocate(memory, bytes);
}
cudaError_t cudaFreeHost(void* memory) {
  notInCapture("cudaFreeHost");
  return release(memory);
}
cudaError_t cudaHostRegister(void*, size_t, unsigned int) {
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void*) {
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  attributes->type = cudaMemoryTypeDevice;
  attributes->device = sim::currentDevice();
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  notInCapture("cudaMemcpy");
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  notInCapture("cudaMemset");
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  const bool pageable =
      !sim::isDeviceMemory(from) && !DeviceMemory::instance().around(from, nullptr, nullptr);
  if (pageable) {  // it has been read when the call returns, as with CUDA
    const auto* const first = static_cast<const char*>(from);
    auto copy = std::make_shared<std::vector<char>>(first, first + bytes);
    streamOf(stream).enqueue([=] { std::memmove(to, copy->data(), bytes); });
  } else {
    streamOf(stream).enqueue([=] { std::memmove(to, from, bytes); });
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  streamOf(stream).enqueue([=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}

// Pools keep nothing: what is freed in a stream's order goes back at once when its turn has come.
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = reinterpret_cast<cudaMemPool_t>(DeviceMemory::instance().allocate(1));
  return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  return release(pool);
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
  return cudaSuccess;
}
cudaError_t cudaMallocFromPoolAsync(void** memory, size_t bytes, cudaMemPool_t, cudaStream_t) {
  return allocate(memory, bytes);
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  streamOf(stream).enqueue([memory] { release(memory); });
  return cudaSuccess;
}

// ---- streams and events

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  *stream = reinterpret_cast<cudaStream_t>(OwnStreams::instance().take());
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int) {
  return nccl_host::cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  OwnStreams::instance().giveBack(&streamOf(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  notInCapture("cudaStreamSynchronize");
  streamOf(stream).synchronize();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  notInCapture("cudaStreamQuery");
  return streamOf(stream).idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  if ((flags & cudaEventWaitExternal) != 0)
    streamOf(stream).blockExternal(eventOf(event));
  else
    streamOf(stream).block(eventOf(event));
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  const bool timed = (flags & cudaEventDisableTiming) == 0;
  *event = reinterpret_cast<cudaEvent_t>(
      new EventHandle(std::make_shared<SimEvent>(sim::currentDevice(), timed)));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return nccl_host::cudaEventCreateWithFlags(event, 0);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &eventOf(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  streamOf(stream).record(eventOf(event));
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  notInCapture("cudaEventQuery");
  return eventOf(event)->done() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  notInCapture("cudaEventSynchronize");
  eventOf(event)->await(eventOf(event)->scheduled());
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  streamOf(stream).enqueue([=] { function(argument); });
  return cudaSuccess;
}

// ---- kernels

cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
  *function = reinterpret_cast<cudaFunction_t>(const_cast<void*>(symbol));
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t,
                             cudaStream_t stream) {
  return launchOneRank(function, arguments, streamOf(stream)) ? cudaSuccess
                                                              : failed(cudaErrorInvalidValue);
}

}  // namespace

std::vector<StandIn> cudaRuntime() {
  return {
      STAND_IN(cudaGetDevice),
      STAND_IN(cudaSetDevice),
      STAND_IN(cudaGetDeviceCount),
      STAND_IN(cudaGetDeviceProperties),
      STAND_IN(cudaDeviceGetAttribute),
      STAND_IN(cudaDeviceGetPCIBusId),
      STAND_IN(cudaDeviceCanAccessPeer),
      STAND_IN(cudaDeviceGetP2PAttribute),
      STAND_IN(cudaDriverGetVersion),
      STAND_IN(cudaRuntimeGetVersion),
      STAND_IN(cudaMemGetInfo),
      STAND_IN(cudaGetErrorString),
      STAND_IN(cudaGetErrorName),
      STAND_IN(cudaGetLastError),
      STAND_IN(cudaPeekAtLastError),
      STAND_IN(cudaGetDriverEntryPoint),
      STAND_IN(cudaGetDriverEntryPointByVersion),
      STAND_IN(cudaMalloc),
      STAND_IN(cudaFree),
      STAND_IN(cudaHostAlloc),
      STAND_IN(cudaMallocHost),
      STAND_IN(cudaFreeHost),
      STAND_IN(cudaHostRegister),
      STAND_IN(cudaHostUnregister),
      STAND_IN(cudaHostGetDevicePointer),
      STAND_IN(cudaPointerGetAttributes),
      STAND_IN(cudaMemcpy),
      STAND_IN(cudaMemset),
      STAND_IN(cudaMemcpyAsync),
      STAND_IN(cudaMemsetAsync),
      STAND_IN(cudaMemPoolCreate),
      STAND_IN(cudaMemPoolDestroy),
      STAND_IN(cudaMemPoolSetAttribute),
      STAND_IN(cudaMemPoolTrimTo),
      STAND_IN(cudaMallocFromPoolAsync),
      STAND_IN(cudaFreeAsync),
      STAND_IN(cudaStreamCreateWithFlags),
      STAND_IN(cudaStreamCreateWithPriority),
      STAND_IN(cudaStreamDestroy),
      STAND_IN(cudaStreamSynchronize),
      STAND_IN(cudaStreamQuery),
      STAND_IN(cudaStreamWaitEvent),
      STAND_IN(cudaEventCreateWithFlags),
      STAND_IN(cudaEventCreate),
      STAND_IN(cudaEventDestroy),
      STAND_IN(cudaEventRecord),
      STAND_IN(cudaEventQuery),
      STAND_IN(cudaEventSynchronize),
      STAND_IN(cudaLaunchHostFunc),
      STAND_IN(cudaGetFuncBySymbol),
      STAND_IN(cudaFuncGetAttributes),
      STAND_IN(cudaFuncSetAttribute),
      STAND_IN(cudaLaunchKernel),
  };
}

size_t liveAllocations() {
  return DeviceMemory::instance().live();
}

}  // namespace torchft_ext::nccl_host
