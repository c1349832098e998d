#include "host/reduce.h"

#include <stdexcept>
#include <string>

#include "host/reduce_table.h"

namespace torchft_ext {
namespace {

static_assert(static_cast<int>(DType::kBool) + 1 == ReduceTable::kItemTypes);
static_assert(static_cast<int>(ReduceKind::kBxor) + 1 == ReduceTable::kReductions);

const ReduceTable& choose() {
#if defined(__x86_64__)
  const ReduceTable* const wide = avx2Reductions();
  if (wide != nullptr && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return *wide;
  }
#endif
  return baselineReductions();
}

const ReduceTable& table() {
  static const ReduceTable& chosen = choose();
  return chosen;
}

template <typename Loop>
Loop required(Loop loop, const char* what, DType dtype) {
  if (loop != nullptr) return loop;
  throw std::logic_error(std::string("no ") + what + " of items of type " + toString(dtype));
}

size_t indexOf(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  if (index < ReduceTable::kItemTypes) return index;
  throw std::logic_error(std::string("no arithmetic of items of type ") + toString(dtype));
}

}  // namespace

void reduceInto(uint8_t* into, const uint8_t* from, size_t bytes, DType dtype, ReduceKind op) {
  const auto loop = table().combine[indexOf(dtype)][static_cast<size_t>(op)];
  required(loop, toString(op), dtype)(into, from, bytes / itemSize(dtype));
}

void multiplyInto(uint8_t* data, const uint8_t* from, size_t bytes, DType dtype,
                  const uint8_t* factor) {
  const auto loop = table().multiply[indexOf(dtype)];
  required(loop, "multiplication", dtype)(data, from, factor, bytes / itemSize(dtype));
}

void divideBy(uint8_t* data, size_t bytes, DType dtype, int divisor) {
  const auto loop = table().divide[indexOf(dtype)];
  required(loop, "division", dtype)(data, divisor, bytes / itemSize(dtype));
}

}  // namespace torchft_ext
