// CUDA's runtime and driver as far as memory and events between processes go (nccl/cuda_ipc.h):
// they do nothing but say on which device, and in whose context, they were called. Its soname is
// the driver's.
//
// As in CUDA, the device is each thread's, 0 at first, and the driver's function wants a context,
// which a thread has once it has called the runtime.
#include <sstream>
#include <string>

#include "nccl/cuda_ipc.h"

using torchft_ext::CudaIpcHandle;
using torchft_ext::NativeStream;

namespace {

constexpr int kInvalidContext = 201;

std::string calls;
thread_local int device = 0;
thread_local bool has_context = false;
int something = 0;  // what handles stand for

int called(const char* name) {
  has_context = true;
  std::ostringstream out;
  out << name << " on " << device << ';';
  calls += out.str();
  return 0;
}

}  // namespace

extern "C" {

// The calls since the last question, for one thread at a time.
const char* stubCalls() {
  static auto* const told = new std::string;
  *told = std::move(calls);
  calls.clear();
  return told->c_str();
}
int stubDevice() {
  return device;
}
// Makes no context, as torch's guard where the device is the current one already.
void stubSetDevice(int index) {
  device = index;
}

int cudaSetDevice(int index) {
  device = index;
  has_context = true;
  return 0;
}
int cuMemGetAddressRange_v2(uintptr_t* base, size_t* bytes, uintptr_t inside) {
  if (!has_context) return kInvalidContext;
  *base = inside;
  *bytes = 1;
  return called("MemGetAddressRange");
}
int cudaIpcGetMemHandle(CudaIpcHandle*, void*) {
  return called("IpcGetMemHandle");
}
int cudaIpcOpenMemHandle(void** base, CudaIpcHandle, unsigned) {
  *base = &something;
  return called("IpcOpenMemHandle");
}
int cudaIpcCloseMemHandle(void*) {
  return called("IpcCloseMemHandle");
}
int cudaIpcGetEventHandle(CudaIpcHandle*, void*) {
  return called("IpcGetEventHandle");
}
int cudaIpcOpenEventHandle(void** event, CudaIpcHandle) {
  *event = &something;
  return called("IpcOpenEventHandle");
}
int cudaEventCreateWithFlags(void** event, unsigned) {
  *event = &something;
  return called("EventCreateWithFlags");
}
int cudaEventRecord(void*, NativeStream) {
  return called("EventRecord");
}
int cudaEventDestroy(void*) {
  return called("EventDestroy");
}
int cudaStreamWaitEvent(NativeStream, void*, unsigned) {
  return called("StreamWaitEvent");
}
int cudaStreamIsCapturing(NativeStream, int* status) {
  *status = 0;
  return called("StreamIsCapturing");
}
int cudaGetLastError() {
  return 0;
}
const char* cudaGetErrorString(int) {
  return "an error";
}
}
