#include "kernel_reduce.h"

#include <cstring>
#include <type_traits>

#include "sim_types.h"

namespace torchft_ext::nccl_host {
namespace {

using sim::kWhole;
using sim::Wide;

// Whole numbers as unsigned ones: one function of NCCL's serves both, and is told which they are
// where that matters.
template <class Use>
void withType(NcclType type, Use use) {
  sim::withType(type, [&](auto kind) {
    using T = decltype(kind);
    use(std::conditional_t<kWhole<T>, Wide<T>, T>{});
  });
}

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
      return static_cast<T>(sim::product(left, right));
    case DeviceOp::kMinMax:
      return kept(one, other, argument) ? one : other;
    default:
      return static_cast<T>(sim::sum(left, right));
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

uint64_t loadArgument(uint64_t address) {
  uint64_t value = 0;
  std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
  return value;
}

void Reduction::before(void* values, size_t count) const {
  if (op != DeviceOp::kPreMulSum) return;
  withType(type, [&](auto kind) {
    using T = decltype(kind);
    sim::multiply(static_cast<T*>(values), count, argumentAs<T>(argument));
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
      auto* at = static_cast<T*>(values);
      for (size_t i = 0; i < count; ++i) at[i] = divided(at[i], argument);
    }
  });
}

}  // namespace torchft_ext::nccl_host
