// NCCL's types of numbers as C++'s, and the arithmetic that both stand-ins for NCCL do in them: the
// simulator (sim_reduce), and NCCL's kernels on the host (tests/nccl_host).
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "nccl/nccl_types.h"

namespace torchft_ext::sim {

// What use(T{}) returns, T being C++'s type for such numbers.
template <class Use>
auto withType(NcclType type, Use use) {
  switch (type) {
    case NcclType::kInt8:
      return use(int8_t{});
    case NcclType::kUint8:
      return use(uint8_t{});
    case NcclType::kInt32:
      return use(int32_t{});
    case NcclType::kUint32:
      return use(uint32_t{});
    case NcclType::kInt64:
      return use(int64_t{});
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
  throw std::invalid_argument("NCCL has no such type");
}

inline size_t sizeOf(NcclType type) {
  return withType(type, [](auto kind) { return sizeof kind; });
}

template <class T>
constexpr bool kWhole = std::is_integral_v<T>;

// What numbers are added and multiplied in: short floats in float; whole ones as unsigned ones,
// which wrap around.
template <class T>
struct WideOf {
  using Type = std::conditional_t<std::is_same_v<T, double>, double, float>;
};
template <class T>
requires kWhole<T>
struct WideOf<T> {
  using Type = std::make_unsigned_t<T>;
};
template <class T>
using Wide = typename WideOf<T>::Type;

template <class W>
W sum(W one, W other) {
  return static_cast<W>(one + other);
}
template <class W>
W product(W one, W other) {
  return static_cast<W>(one * other);
}

// Each of them times the factor, rounded once.
template <class T>
void multiply(T* values, size_t count, T factor) {
  for (size_t i = 0; i < count; ++i)
    values[i] =
        static_cast<T>(product(static_cast<Wide<T>>(values[i]), static_cast<Wide<T>>(factor)));
}

}  // namespace torchft_ext::sim
