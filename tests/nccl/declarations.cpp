// Compiles if csrc/nccl declares NCCL's types, values and functions as the nccl.h that it is given
// does: what no compiler sees where functions are found by name at run time.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "nccl/nccl_entry_points.h"
#include "nccl/nccl_types.h"

namespace torchft_ext {
namespace {

// ---- a type of theirs travels as one of ours

template <typename Theirs, typename Ours>
constexpr bool sameValue() {
  using Their = std::remove_cv_t<Theirs>;
  using Our = std::remove_cv_t<Ours>;
  if constexpr (std::is_same_v<Their, Our>) return true;
  if constexpr (std::is_enum_v<Their>)
    return std::is_same_v<Our, int> && sizeof(Their) == sizeof(int);
  if constexpr (std::is_same_v<Their, ncclUniqueId>) {
    return std::is_same_v<Our, NcclUniqueId> && sizeof(Their) == sizeof(Our) &&
           alignof(Their) == alignof(Our) && std::is_trivially_copyable_v<Our>;
  }
  if constexpr (std::is_same_v<Their, ncclComm_t>) return std::is_same_v<Our, NcclComm>;
  if constexpr (std::is_same_v<Their, cudaStream_t>) return std::is_same_v<Our, NativeStream>;
  if constexpr (std::is_same_v<Their, ncclConfig_t>) return std::is_same_v<Our, NcclConfig>;
  if constexpr (std::is_pointer_v<Their> && std::is_pointer_v<Our>) {
    using To = std::remove_pointer_t<Their>;
    using OurTo = std::remove_pointer_t<Our>;
    if constexpr (std::is_void_v<To> || std::is_void_v<OurTo>)
      return false;
    else
      return std::is_const_v<To> == std::is_const_v<OurTo> && sameValue<To, OurTo>();
  }
  return false;
}

template <typename Theirs, typename Ours>
struct SameCall : std::false_type {};
template <typename R, typename... A, typename OurR, typename... OurA>
struct SameCall<R (*)(A...), OurR (*)(OurA...)> {
  static constexpr bool arguments() {
    if constexpr (sizeof...(A) == sizeof...(OurA)) return (sameValue<A, OurA>() && ...);
    return false;
  }
  static constexpr bool value = sameValue<R, OurR>() && arguments();
};

// The comparison itself tells types apart.
static_assert(!sameValue<size_t, int>() && !sameValue<int*, size_t*>());
static_assert(!sameValue<ncclComm_t, NativeStream>() && !sameValue<const void*, void*>());
static_assert(!SameCall<int (*)(int, int), int (*)(int)>::value);

#define TFT_SAME(name)                                                                   \
  static_assert(SameCall<decltype(&nccl##name), decltype(NcclEntryPoints::name)>::value, \
                "nccl" #name " is declared otherwise by this nccl.h")

TFT_SAME(GetVersion);
TFT_SAME(GetLastError);
TFT_SAME(GetUniqueId);
TFT_SAME(CommInitRankConfig);
TFT_SAME(CommGetAsyncError);
TFT_SAME(CommFinalize);
TFT_SAME(CommDestroy);
TFT_SAME(CommAbort);
TFT_SAME(GroupStart);
TFT_SAME(GroupEnd);
TFT_SAME(AllReduce);
TFT_SAME(Broadcast);
TFT_SAME(Reduce);
TFT_SAME(AllGather);
TFT_SAME(ReduceScatter);
TFT_SAME(Send);
TFT_SAME(Recv);
TFT_SAME(RedOpCreatePreMulSum);
TFT_SAME(RedOpDestroy);
#if NCCL_VERSION_CODE >= 21903
TFT_SAME(CommRegister);
TFT_SAME(CommDeregister);
#endif
#if NCCL_VERSION_CODE >= 22304
TFT_SAME(CommInitRankScalable);
#endif
#if NCCL_VERSION_CODE >= 22807
TFT_SAME(CommRevoke);
static_assert(NCCL_REVOKE_DEFAULT == kNcclRevokeDefault);
#endif

// ---- values

constexpr bool is(ncclResult_t theirs, NcclResult ours) {
  return static_cast<int>(theirs) == static_cast<int>(ours);
}
static_assert(is(ncclSuccess, NcclResult::kSuccess));
static_assert(is(ncclUnhandledCudaError, NcclResult::kUnhandledCudaError));
static_assert(is(ncclSystemError, NcclResult::kSystemError));
static_assert(is(ncclInternalError, NcclResult::kInternalError));
static_assert(is(ncclInvalidArgument, NcclResult::kInvalidArgument));
static_assert(is(ncclInvalidUsage, NcclResult::kInvalidUsage));
static_assert(is(ncclRemoteError, NcclResult::kRemoteError));
static_assert(is(ncclInProgress, NcclResult::kInProgress));
#if NCCL_VERSION_CODE >= 23007
static_assert(is(ncclTimeout, NcclResult::kTimeout));
#endif

constexpr bool is(ncclDataType_t theirs, NcclType ours) {
  return static_cast<int>(theirs) == static_cast<int>(ours);
}
static_assert(is(ncclInt8, NcclType::kInt8));
static_assert(is(ncclUint8, NcclType::kUint8));
static_assert(is(ncclInt32, NcclType::kInt32));
static_assert(is(ncclUint32, NcclType::kUint32));
static_assert(is(ncclInt64, NcclType::kInt64));
static_assert(is(ncclUint64, NcclType::kUint64));
static_assert(is(ncclFloat16, NcclType::kFloat16));
static_assert(is(ncclFloat32, NcclType::kFloat32));
static_assert(is(ncclFloat64, NcclType::kFloat64));
#if NCCL_VERSION_CODE >= 22403  // before it their names depend on the CUDA they are compiled with
static_assert(is(ncclBfloat16, NcclType::kBFloat16));
static_assert(is(ncclFloat8e4m3, NcclType::kFloat8E4M3));
static_assert(is(ncclFloat8e5m2, NcclType::kFloat8E5M2));
#endif

static_assert(ncclSum == kNcclSum && ncclProd == kNcclProd && ncclMax == kNcclMax &&
              ncclMin == kNcclMin && ncclAvg == kNcclAvg);
static_assert(ncclScalarDevice == kNcclScalarDevice &&
              ncclScalarHostImmediate == kNcclScalarHostImmediate);

// ---- the configuration is a prefix of theirs

static_assert(NCCL_CONFIG_UNDEF_INT == NcclConfig::kUnset);
static_assert(sizeof(ncclConfig_t) >= sizeof(NcclConfig));
#define TFT_SAME_PLACE(theirs, ours)                                            \
  static_assert(offsetof(ncclConfig_t, theirs) == offsetof(NcclConfig, ours) && \
                std::is_same_v<decltype(ncclConfig_t::theirs), decltype(NcclConfig::ours)>)
TFT_SAME_PLACE(size, size);
TFT_SAME_PLACE(magic, magic);
TFT_SAME_PLACE(version, version);
TFT_SAME_PLACE(blocking, blocking);
TFT_SAME_PLACE(cgaClusterSize, cga_cluster_size);
TFT_SAME_PLACE(minCTAs, min_ctas);
TFT_SAME_PLACE(maxCTAs, max_ctas);
TFT_SAME_PLACE(netName, net_name);
TFT_SAME_PLACE(splitShare, split_share);
constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
static_assert(kTheirs.magic == NcclConfig{}.magic);
static_assert(kTheirs.version >= kNcclConfigVersion);

}  // namespace
}  // namespace torchft_ext
