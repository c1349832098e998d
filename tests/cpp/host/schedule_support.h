// The operations that the tests of schedules are made of.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "comm/operation.h"

namespace torchft_ext {

constexpr float kFactor = 3;  // of kPreMulSum

template <typename T>
constexpr DType dtypeOf() {
  if constexpr (std::is_same_v<T, float>) return DType::kFloat;
  if constexpr (std::is_same_v<T, uint8_t>) return DType::kUint8;
  return DType::kInt64;
}

template <typename T>
Buffer bufferOf(std::vector<T>& items) {
  return {reinterpret_cast<uint8_t*>(items.data()), items.size() * sizeof(T)};
}

template <typename T>
Operation operationOf(OpKind kind, ReduceKind reduce = ReduceKind::kSum, int root = 0) {
  Operation operation;
  operation.kind = kind;
  operation.dtype = dtypeOf<T>();
  operation.reduce = reduce;
  operation.root = root;
  std::memcpy(operation.factor.data(), &kFactor, sizeof(kFactor));
  return operation;
}

}  // namespace torchft_ext
