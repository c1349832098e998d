#include "host/reduce.h"

#include <stdexcept>
#include <string>

#include "host/reduce_table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace torchft_ext {
namespace {

static_assert(static_cast<int>(DType::kBool) + 1 == ReduceTable::kItemTypes);
static_assert(static_cast<int>(ReduceKind::kBxor) + 1 == ReduceTable::kReductions);

// Compilers know no name for F16C here.
bool hasAvx2AndF16c() {
#if defined(__x86_64__)
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
  return (ecx & bit_F16C) != 0 && __builtin_cpu_supports("avx2") != 0;
#else
  return false;
#endif
}

const ReduceTable& choose() {
  const ReduceTable* const wide = avx2Reductions();
  return wide != nullptr && hasAvx2AndF16c() ? *wide : baselineReductions();
}

}  // namespace

const ReduceTable& chosenReductions() {
  static const ReduceTable& chosen = choose();
  return chosen;
}

namespace {

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
  const auto loop = chosenReductions().combine[indexOf(dtype)][static_cast<size_t>(op)];
  required(loop, toString(op), dtype)(into, from, bytes / itemSize(dtype));
}

void multiplyInto(uint8_t* data, const uint8_t* from, size_t bytes, DType dtype,
                  const uint8_t* factor) {
  const auto loop = chosenReductions().multiply[indexOf(dtype)];
  required(loop, "multiplication", dtype)(data, from, factor, bytes / itemSize(dtype));
}

void divideBy(uint8_t* data, size_t bytes, DType dtype, int divisor) {
  const auto loop = chosenReductions().divide[indexOf(dtype)];
  required(loop, "division", dtype)(data, divisor, bytes / itemSize(dtype));
}

}  // namespace torchft_ext
