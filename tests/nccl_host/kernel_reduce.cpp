#include "kernel_reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>

#include <cstring>
#include <type_traits>

namespace torchft_ext::nccl_host {
namespace {

template <class T>
constexpr bool kWhole = std::is_integral_v<T>;

// What short floats are added and multiplied in.
template <class T>
using Wide = std::conditional_t<kWhole<T> || std::is_same_v<T, double>, T, float>;

template <class T>
T argumentAs(uint64_t argument) {
  T value;
  std::memcpy(&value, &argument, sizeof value);
  return value;
}

// Whole numbers are compared as unsigned ones under a mask that NCCL chose: of the sign bit where
// they are signed, of all bits for the greater one. Floats: bit 0 says that it is the greater.
template <class T>
bool kept(T one, T other, uint64_t argument) {
  if constexpr (kWhole<T>) {
    const T mask = static_cast<T>(argument);
    return static_cast<T>(one ^ mask) < static_cast<T>(other ^ mask);
  } else {
    const auto left = static_cast<Wide<T>>(one);
    const auto right = static_cast<Wide<T>>(other);
    return (argument & 1) == 0 ? left < right : left > right;
  }
}

template <class T>
T combined(T one, T other, DeviceOp op, uint64_t argument) {
  const auto left = static_cast<Wide<T>>(one);
  const auto right = static_cast<Wide<T>>(other);
  switch (op) {
    case DeviceOp::kProduct:
      return static_cast<T>(left * right);
    case DeviceOp::kMinMax:
      return kept(one, other, argument) ? one : other;
    default:
      return static_cast<T>(left + right);
  }
}

template <class T, class Do>
void each(void* values, size_t count, Do what) {
  auto* at = static_cast<T*>(values);
  for (size_t i = 0; i < count; ++i) at[i] = what(at[i]);
}

template <class Use>
void withType(NcclType type, Use use) {
  switch (type) {
    case NcclType::kInt8:
    case NcclType::kUint8:
      return use(uint8_t{});
    case NcclType::kInt32:
    case NcclType::kUint32:
      return use(uint32_t{});
    case NcclType::kInt64:
    case NcclType::kUint64:
      return use(uint64_t{});
    case NcclType::kFloat16:
      return use(c10::Half{});
    case NcclType::kFloat32:
      return use(float{});
    case NcclType::kFloat64:
      return use(double{});
    case NcclType::kBFloat16:
      return use(c10::BFloat16{});
    case NcclType::kFloat8E4M3:
      return use(c10::Float8_e4m3fn{});
    case NcclType::kFloat8E5M2:
      return use(c10::Float8_e5m2{});
  }
}

// The mean of whole numbers: the argument is the number of ranks, and whether they are signed.
template <class T>
T divided(T sum, uint64_t argument) {
  const auto ranks = static_cast<T>(argument >> 1);
  if ((argument & 1) == 0) return static_cast<T>(sum / ranks);
  using Signed = std::make_signed_t<T>;
  return static_cast<T>(static_cast<Signed>(sum) / static_cast<Signed>(ranks));
}

}  // namespace

size_t bytesOf(NcclType type) {
  size_t bytes = 0;
  withType(type, [&](auto value) { bytes = sizeof value; });
  return bytes;
}

uint64_t loadArgument(uint64_t address) {
  uint64_t value = 0;
  std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
  return value;
}

void Reduction::before(void* values, size_t count) const {
  if (op != DeviceOp::kPreMulSum) return;
  withType(type, [&](auto kind) {
    using T = decltype(kind);
    const T factor = argumentAs<T>(argument);
    each<T>(values, count, [&](T value) {
      return static_cast<T>(static_cast<Wide<T>>(value) * static_cast<Wide<T>>(factor));
    });
  });
}

void Reduction::combine(void* into, const void* with, size_t count) const {
  withType(type, [&](auto kind) {
    using T = decltype(kind);
    auto* left = static_cast<T*>(into);
    const auto* right = static_cast<const T*>(with);
    for (size_t i = 0; i < count; ++i) left[i] = combined(left[i], right[i], op, argument);
  });
}

void Reduction::after(void* values, size_t count) const {
  if (op != DeviceOp::kSumPostDivide) return;
  withType(type, [&](auto kind) {
    using T = decltype(kind);
    if constexpr (kWhole<T>) {
      each<T>(values, count, [&](T value) { return divided(value, argument); });
    }
  });
}

}  // namespace torchft_ext::nccl_host
