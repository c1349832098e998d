// Compiles if csrc/nccl declares what it takes from CUDA's runtime and driver between processes as
// their headers do: what no compiler sees where functions are found by name at run time.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "nccl/cuda_ipc.h"

namespace torchft_ext {
namespace {

// ---- a type of theirs travels as one of ours

template <typename Theirs, typename Ours>
constexpr bool sameValue() {
  constexpr bool is_handle =
      std::is_same_v<Theirs, cudaIpcMemHandle_t> || std::is_same_v<Theirs, cudaIpcEventHandle_t>;
  if constexpr (std::is_same_v<Theirs, Ours>) return true;
  if constexpr (is_handle)
    return std::is_same_v<Ours, CudaIpcHandle> && sizeof(Theirs) == sizeof(Ours) &&
           alignof(Theirs) == alignof(Ours) && std::is_trivially_copyable_v<Ours>;
  if constexpr (std::is_enum_v<Theirs>)
    return std::is_same_v<Ours, int> && sizeof(Theirs) == sizeof(int);
  if constexpr (std::is_same_v<Theirs, cudaEvent_t> || std::is_same_v<Theirs, cudaStream_t>)
    return std::is_same_v<Ours, void*>;
  if constexpr (std::is_same_v<Theirs, CUdeviceptr>)
    return std::is_same_v<Ours, uintptr_t> && sizeof(Theirs) == sizeof(Ours);
  if constexpr (std::is_pointer_v<Theirs> && std::is_pointer_v<Ours>)
    return sameValue<std::remove_pointer_t<Theirs>, std::remove_pointer_t<Ours>>();
  return false;
}

template <typename Theirs, typename Ours>
struct SameCall : std::false_type {};
template <typename R, typename... A, typename OurR, typename... OurA>
struct SameCall<R(A...), OurR (*)(OurA...)> {
  static constexpr bool arguments() {
    if constexpr (sizeof...(A) == sizeof...(OurA)) return (sameValue<A, OurA>() && ...);
    return false;
  }
  static constexpr bool value = sameValue<R, OurR>() && arguments();
};

// The comparison itself tells types apart.
static_assert(!sameValue<cudaIpcMemHandle_t, int>() && !sameValue<size_t*, int*>());
static_assert(!SameCall<int(int, int), int (*)(int)>::value);

#define TFT_SAME(prefix, name)                                                               \
  static_assert(SameCall<decltype(prefix##name), decltype(CudaIpcEntryPoints::name)>::value, \
                #prefix #name " is declared otherwise by this CUDA")

TFT_SAME(cuda, IpcGetMemHandle);
TFT_SAME(cuda, IpcOpenMemHandle);
TFT_SAME(cuda, IpcCloseMemHandle);
TFT_SAME(cuda, IpcGetEventHandle);
TFT_SAME(cuda, IpcOpenEventHandle);
TFT_SAME(cuda, EventCreateWithFlags);
TFT_SAME(cuda, EventRecord);
TFT_SAME(cuda, EventDestroy);
TFT_SAME(cuda, StreamWaitEvent);
TFT_SAME(cuda, StreamIsCapturing);
TFT_SAME(cuda, SetDevice);
TFT_SAME(cuda, GetLastError);
TFT_SAME(cuda, GetErrorString);
TFT_SAME(cu, MemGetAddressRange);

// ---- values

static_assert(cudaEventDisableTiming == kCudaEventDisableTiming);
static_assert(cudaEventInterprocess == kCudaEventInterprocess);
static_assert(cudaIpcMemLazyEnablePeerAccess == kCudaLazyEnablePeerAccess);
static_assert(cudaSuccess == 0 && CUDA_SUCCESS == 0);

}  // namespace
}  // namespace torchft_ext
