// The loops themselves, for the compiler to vectorise: included by each reduce_*.cpp, which is
// compiled for its instruction set, and by nothing else. All of it is local to the file.
#pragma once

#include <cstdint>

#include "host/reduce_table.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

// No item depends on another one: data and from may be the same memory, but not be shifted.
#if defined(__clang__)
#define TFT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TFT_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace torchft_ext {
namespace {

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

template <typename To, typename From>
inline To bitsAs(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// Memory of any alignment.
template <typename T>
inline T load(const void* memory, size_t item) {
  T value;
  __builtin_memcpy(&value, static_cast<const char*>(memory) + item * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
inline void store(void* memory, size_t item, T value) {
  __builtin_memcpy(static_cast<char*>(memory) + item * sizeof(T), &value, sizeof(T));
}

// ---- what an item is computed as

inline float widen(float value) {
  return value;
}
inline double widen(double value) {
  return value;
}
inline float widen(Bfloat value) {
  return bitsAs<float>(static_cast<uint32_t>(value.bits) << 16U);
}
// The exponent is rebased by a multiplication, which puts subnormal ones right too.
inline float widen(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000U) << 16U;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fffU) << 13U;
  const uint32_t finite = bitsAs<uint32_t>(bitsAs<float>(rest) * 0x1p112F);
  const uint32_t special = (value.bits & 0x7c00U) == 0x7c00U ? 0x7f800000U : 0U;
  return bitsAs<float>(finite | special | sign);
}

template <typename T>
struct Narrow;

template <>
struct Narrow<float> {
  static float of(float value) { return value; }
};
template <>
struct Narrow<double> {
  static double of(double value) { return value; }
};

// Rounded to nearest, ties to even.
template <>
struct Narrow<Bfloat> {
  static Bfloat of(float value) {
    const auto bits = bitsAs<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16U) & 1U)) >> 16U;
    return {static_cast<uint16_t>(__builtin_isunordered(value, value) ? 0x7fc0U : rounded)};
  }
};
template <>
struct Narrow<Half> {
  static Half of(float value) {
    const auto bits = bitsAs<uint32_t>(value);
    const uint32_t sign = (bits >> 16U) & 0x8000U;
    const uint32_t magnitude = bits & 0x7fffffffU;
    const uint32_t normal = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13U) & 1U)) >> 13U;
    // The sum's last bit is worth what a half's is below its smallest normal number.
    const uint32_t subnormal = bitsAs<uint32_t>(bitsAs<float>(magnitude) + 0.5F) - 0x3f000000U;
    uint32_t found = magnitude < 0x38800000U ? subnormal : normal;
    found = magnitude >= 0x477ff000U ? 0x7c00U : found;
    found = magnitude > 0x7f800000U ? 0x7e00U : found;
    return {static_cast<uint16_t>(found | sign)};
  }
};

// ---- integers: sums and products wrap round

template <typename T>
struct Unsigned;
template <>
struct Unsigned<int8_t> {
  using Type = uint8_t;
  using Wide = uint32_t;
};
template <>
struct Unsigned<uint8_t> {
  using Type = uint8_t;
  using Wide = uint32_t;
};
template <>
struct Unsigned<int16_t> {
  using Type = uint16_t;
  using Wide = uint32_t;
};
template <>
struct Unsigned<int32_t> {
  using Type = uint32_t;
  using Wide = uint32_t;
};
template <>
struct Unsigned<int64_t> {
  using Type = uint64_t;
  using Wide = uint64_t;
};

template <typename T>
inline T wrapped(typename Unsigned<T>::Wide value) {
  return static_cast<T>(static_cast<typename Unsigned<T>::Type>(value));
}

// ---- reductions of two items

struct Sum {
  template <typename T>
  static T integers(T a, T b) {
    using Wide = typename Unsigned<T>::Wide;
    return wrapped<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
  }
  template <typename F>
  static F floats(F a, F b) {
    return a + b;
  }
};

struct Product {
  template <typename T>
  static T integers(T a, T b) {
    using Wide = typename Unsigned<T>::Wide;
    return wrapped<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
  }
  template <typename F>
  static F floats(F a, F b) {
    return a * b;
  }
};

struct Min {
  template <typename T>
  static T integers(T a, T b) {
    return b < a ? b : a;
  }
};

struct Max {
  template <typename T>
  static T integers(T a, T b) {
    return a < b ? b : a;
  }
};

struct And {
  template <typename T>
  static T integers(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <typename T>
  static T integers(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <typename T>
  static T integers(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// ---- over spans

template <typename T, typename Op>
void combineIntegers(void* into, const void* from, size_t items) {
  TFT_INDEPENDENT
  for (size_t i = 0; i < items; ++i) {
    store<T>(into, i, Op::template integers<T>(load<T>(into, i), load<T>(from, i)));
  }
}

template <typename T, typename Op>
void combineFloats(void* into, const void* from, size_t items) {
  TFT_INDEPENDENT
  for (size_t i = 0; i < items; ++i) {
    const auto result = Op::floats(widen(load<T>(into, i)), widen(load<T>(from, i)));
    store<T>(into, i, Narrow<T>::of(result));
  }
}

// ---- over vectors, where compilers do not find the best instructions by themselves

#ifdef __AVX__
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif

template <typename T>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Floats = float __attribute__((vector_size(kVectorBytes)));
  using Bits = uint32_t __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<double> {
  using Floats = double __attribute__((vector_size(kVectorBytes)));
  using Bits = uint64_t __attribute__((vector_size(kVectorBytes)));
};
using Floats = VectorOf<float>::Floats;
using Words = VectorOf<float>::Bits;

// What is left at the end is done in a vector too, beside zeros.
template <typename Vector, Vector (*combine)(Vector, Vector)>
void combineVectors(void* into, const void* from, size_t bytes) {
  size_t i = 0;
  for (; i < bytes / sizeof(Vector); ++i) {
    store<Vector>(into, i, combine(load<Vector>(into, i), load<Vector>(from, i)));
  }
  const size_t done = i * sizeof(Vector);
  if (done == bytes) return;
  Vector a{};
  Vector b{};
  __builtin_memcpy(&a, static_cast<const char*>(into) + done, bytes - done);
  __builtin_memcpy(&b, static_cast<const char*>(from) + done, bytes - done);
  a = combine(a, b);
  __builtin_memcpy(static_cast<char*>(into) + done, &a, bytes - done);
}

// Each choice is one instruction, which takes its second operand where they are equal or not
// ordered. Equal numbers have equal bits, but for the two zeros, of which so the sign is the and,
// or the or. One of the choices is a NaN, and so unequal to the other, exactly where an operand is.
template <typename T>
inline typename VectorOf<T>::Floats greater(typename VectorOf<T>::Floats a,
                                            typename VectorOf<T>::Floats b) {
  using Bits = typename VectorOf<T>::Bits;
  const auto one = a > b ? a : b;
  const auto other = b > a ? b : a;
  const Bits nan = reinterpret_cast<Bits>(one != other);
  return reinterpret_cast<typename VectorOf<T>::Floats>(
      (reinterpret_cast<Bits>(one) & reinterpret_cast<Bits>(other)) | nan);
}
template <typename T>
inline typename VectorOf<T>::Floats less(typename VectorOf<T>::Floats a,
                                         typename VectorOf<T>::Floats b) {
  using Bits = typename VectorOf<T>::Bits;
  const auto one = a < b ? a : b;
  const auto other = b < a ? b : a;
  const Bits nan = reinterpret_cast<Bits>(one != other);
  return reinterpret_cast<typename VectorOf<T>::Floats>(reinterpret_cast<Bits>(one) |
                                                        reinterpret_cast<Bits>(other) | nan);
}

template <typename T>
void maxOfFloats(void* into, const void* from, size_t items) {
  combineVectors<typename VectorOf<T>::Floats, greater<T>>(into, from, items * sizeof(T));
}
template <typename T>
void minOfFloats(void* into, const void* from, size_t items) {
  combineVectors<typename VectorOf<T>::Floats, less<T>>(into, from, items * sizeof(T));
}

// As Narrow<Bfloat>; the result is the upper half of each word.
inline Words roundedToBfloats(Floats values) {
  const Words bits = reinterpret_cast<Words>(values);
  const Words rounded = bits + 0x7fffU + ((bits >> 16U) & 1U);
  return values != values ? Words{} + 0x7fc00000U : rounded;
}

// A word is two items. The upper one is a float as it stands, but for bits below; the lower one is
// moved up. So nothing is unpacked and packed.
template <typename Op>
inline Words pairsOfBfloats(Words a, Words b) {
  const auto upper = [](Words pair) { return reinterpret_cast<Floats>(pair & 0xffff0000U); };
  const auto lower = [](Words pair) { return reinterpret_cast<Floats>(pair << 16U); };
  const Words above = roundedToBfloats(Op::floats(upper(a), upper(b)));
  const Words below = roundedToBfloats(Op::floats(lower(a), lower(b)));
  return (above & 0xffff0000U) | (below >> 16U);
}

template <typename Op>
void combineBfloats(void* into, const void* from, size_t items) {
  combineVectors<Words, pairsOfBfloats<Op>>(into, from, items * sizeof(Bfloat));
}

// Numbers of 16 bits in the order of integers: a negative one's magnitude counts the other way.
inline int16_t orderOf(int16_t bits) {
  const auto negative = static_cast<int16_t>(bits >> 15);
  return static_cast<int16_t>(bits ^ static_cast<int16_t>(negative & 0x7fff));
}
inline int16_t magnitudeOf(int16_t bits) {
  return static_cast<int16_t>(bits & 0x7fff);
}
template <typename T>
constexpr int16_t kInfinity = 0x7c00;
template <>
constexpr int16_t kInfinity<Bfloat> = 0x7f80;

// Min and Max: nothing is rounded, so nothing need be widened.
template <typename T, typename Op>
void combineOrdered(void* into, const void* from, size_t items) {
  TFT_INDEPENDENT
  for (size_t i = 0; i < items; ++i) {
    const auto a = load<int16_t>(into, i);
    const auto b = load<int16_t>(from, i);
    const int16_t chosen = orderOf(Op::template integers<int16_t>(orderOf(a), orderOf(b)));
    const int16_t most = Max::integers<int16_t>(magnitudeOf(a), magnitudeOf(b));
    store<int16_t>(into, i, most > kInfinity<T> ? int16_t{0x7fff} : chosen);
  }
}

template <typename T>
void multiplyFloats(void* data, const void* from, const void* factor, size_t items) {
  const auto by = widen(load<T>(factor, 0));
  TFT_INDEPENDENT
  for (size_t i = 0; i < items; ++i) {
    store<T>(data, i, Narrow<T>::of(widen(load<T>(from, i)) * by));
  }
}

template <typename T>
void divideFloats(void* data, int divisor, size_t items) {
  const auto by = static_cast<decltype(widen(T{}))>(divisor);
  TFT_INDEPENDENT
  for (size_t i = 0; i < items; ++i) {
    store<T>(data, i, Narrow<T>::of(widen(load<T>(data, i)) / by));
  }
}

template <typename T>
void divideIntegers(void* data, int divisor, size_t items) {
  for (size_t i = 0; i < items; ++i) {
    store<T>(data, i, static_cast<T>(static_cast<int64_t>(load<T>(data, i)) / divisor));
  }
}

#ifdef __F16C__
// Compilers do not find the conversions of eight halves at once.
template <typename Op>
void combineHalves(void* into, const void* from, size_t items) {
  size_t i = 0;
  for (; i + 8 <= items; i += 8) {
    auto* const target = reinterpret_cast<__m128i*>(static_cast<char*>(into) + i * 2);
    const auto* const source =
        reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + i * 2);
    float a[8];
    float b[8];
    _mm256_storeu_ps(a, _mm256_cvtph_ps(_mm_loadu_si128(target)));
    _mm256_storeu_ps(b, _mm256_cvtph_ps(_mm_loadu_si128(source)));
    for (int k = 0; k < 8; ++k) a[k] = Op::floats(a[k], b[k]);
    _mm_storeu_si128(target, _mm256_cvtps_ph(_mm256_loadu_ps(a), _MM_FROUND_TO_NEAREST_INT));
  }
  char* const rest = static_cast<char*>(into) + i * 2;
  combineFloats<Half, Op>(rest, static_cast<const char*>(from) + i * 2, items - i);
}
#else
template <typename Op>
void combineHalves(void* into, const void* from, size_t items) {
  combineFloats<Half, Op>(into, from, items);
}
#endif

// ---- the table, in the order of DType and ReduceKind

template <typename T>
constexpr void addIntegers(ReduceTable& table, int type) {
  const ReduceTable::Combine all[] = {
      combineIntegers<T, Sum>, combineIntegers<T, Sum>, combineIntegers<T, Product>,
      combineIntegers<T, Min>, combineIntegers<T, Max>, combineIntegers<T, Sum>,
      combineIntegers<T, And>, combineIntegers<T, Or>,  combineIntegers<T, Xor>};
  for (int op = 0; op < ReduceTable::kReductions; ++op) table.combine[type][op] = all[op];
  table.divide[type] = divideIntegers<T>;
}

template <typename T>
constexpr void addFloats(ReduceTable& table, int type, ReduceTable::Combine sum,
                         ReduceTable::Combine product, ReduceTable::Combine min,
                         ReduceTable::Combine max) {
  const ReduceTable::Combine all[] = {sum, sum, product, min, max, sum};
  for (int op = 0; op < 6; ++op) table.combine[type][op] = all[op];
  table.multiply[type] = multiplyFloats<T>;
  table.divide[type] = divideFloats<T>;
}

constexpr void addBools(ReduceTable& table, int type) {
  const ReduceTable::Combine all_of = combineIntegers<uint8_t, And>;
  const ReduceTable::Combine any_of = combineIntegers<uint8_t, Or>;
  const ReduceTable::Combine all[] = {any_of, any_of, all_of,
                                      all_of, any_of, any_of,
                                      all_of, any_of, combineIntegers<uint8_t, Xor>};
  for (int op = 0; op < ReduceTable::kReductions; ++op) table.combine[type][op] = all[op];
}

constexpr ReduceTable makeTable() {
  ReduceTable table{};
  addFloats<float>(table, 0, combineFloats<float, Sum>, combineFloats<float, Product>,
                   minOfFloats<float>, maxOfFloats<float>);
  addFloats<double>(table, 1, combineFloats<double, Sum>, combineFloats<double, Product>,
                    minOfFloats<double>, maxOfFloats<double>);
  addFloats<Half>(table, 2, combineHalves<Sum>, combineHalves<Product>, combineOrdered<Half, Min>,
                  combineOrdered<Half, Max>);
  addFloats<Bfloat>(table, 3, combineBfloats<Sum>, combineBfloats<Product>,
                    combineOrdered<Bfloat, Min>, combineOrdered<Bfloat, Max>);
  addIntegers<int8_t>(table, 4);
  addIntegers<int16_t>(table, 5);
  addIntegers<int32_t>(table, 6);
  addIntegers<int64_t>(table, 7);
  addIntegers<uint8_t>(table, 8);
  addBools(table, 9);
  return table;
}

constexpr ReduceTable kTable = makeTable();

}  // namespace
}  // namespace torchft_ext

#undef TFT_INDEPENDENT
