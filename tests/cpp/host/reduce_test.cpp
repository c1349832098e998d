#include "host/reduce.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "host/reduce_table.h"

namespace torchft_ext {
namespace {

template <typename T>
std::vector<T> reduced(std::vector<T> into, const std::vector<T>& from, DType dtype,
                       ReduceKind op) {
  reduceInto(reinterpret_cast<uint8_t*>(into.data()), reinterpret_cast<const uint8_t*>(from.data()),
             into.size() * sizeof(T), dtype, op);
  return into;
}

template <typename T>
std::vector<T> divided(std::vector<T> values, DType dtype, int divisor) {
  divideBy(reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(T), dtype, divisor);
  return values;
}

template <typename T>
std::vector<T> multiplied(const std::vector<T>& values, DType dtype, T factor) {
  std::vector<T> product(values.size());
  multiplyInto(reinterpret_cast<uint8_t*>(product.data()),
               reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(T), dtype,
               reinterpret_cast<const uint8_t*>(&factor));
  return product;
}

TEST(Reduce, FactorsAreItemsOfTheDtype) {
  EXPECT_EQ(multiplied<float>({1, -2, 3}, DType::kFloat, 0.5F), (std::vector<float>{0.5, -1, 1.5}));
  EXPECT_EQ(multiplied<double>({1, -2, 3}, DType::kDouble, 0.5),
            (std::vector<double>{0.5, -1, 1.5}));
  // 1 and 2 times 2, as halves and bfloat16s.
  EXPECT_EQ(multiplied<uint16_t>({0x3c00, 0x4000}, DType::kHalf, 0x4000),
            (std::vector<uint16_t>{0x4000, 0x4400}));
  EXPECT_EQ(multiplied<uint16_t>({0x3f80, 0x4000}, DType::kBFloat16, 0x4000),
            (std::vector<uint16_t>{0x4000, 0x4080}));
}

TEST(Reduce, MultipliesInPlaceAndLongSpans) {
  std::vector<float> values(100001, 3);
  const float factor = 7;
  auto* const bytes = reinterpret_cast<uint8_t*>(values.data());
  multiplyInto(bytes, bytes, values.size() * sizeof(float), DType::kFloat,
               reinterpret_cast<const uint8_t*>(&factor));
  EXPECT_EQ(values, std::vector<float>(100001, 21));
}

template <typename T>
void checkAllReductions(DType dtype) {
  SCOPED_TRACE(toString(dtype));
  const std::vector<T> a{1, 2, 3, 5};
  const std::vector<T> b{4, 2, 1, 6};
  EXPECT_EQ(reduced(a, b, dtype, ReduceKind::kSum), (std::vector<T>{5, 4, 4, 11}));
  EXPECT_EQ(reduced(a, b, dtype, ReduceKind::kAvg), (std::vector<T>{5, 4, 4, 11}));
  EXPECT_EQ(reduced(a, b, dtype, ReduceKind::kProduct), (std::vector<T>{4, 4, 3, 30}));
  EXPECT_EQ(reduced(a, b, dtype, ReduceKind::kMin), (std::vector<T>{1, 2, 1, 5}));
  EXPECT_EQ(reduced(a, b, dtype, ReduceKind::kMax), (std::vector<T>{4, 2, 3, 6}));
}

TEST(Reduce, AllNativeTypesByAllReductions) {
  checkAllReductions<float>(DType::kFloat);
  checkAllReductions<double>(DType::kDouble);
  checkAllReductions<int8_t>(DType::kInt8);
  checkAllReductions<int16_t>(DType::kInt16);
  checkAllReductions<int32_t>(DType::kInt32);
  checkAllReductions<int64_t>(DType::kInt64);
  checkAllReductions<uint8_t>(DType::kUint8);
}

template <typename T>
void checkBitwiseReductions(DType dtype) {
  SCOPED_TRACE(toString(dtype));
  const std::vector<T> a{0, 1, 6, static_cast<T>(-1)};
  const std::vector<T> b{1, 1, 3, 5};
  EXPECT_EQ(reduced(a, b, dtype, ReduceKind::kBand), (std::vector<T>{0, 1, 2, 5}));
  EXPECT_EQ(reduced(a, b, dtype, ReduceKind::kBor), (std::vector<T>{1, 1, 7, static_cast<T>(-1)}));
  EXPECT_EQ(reduced(a, b, dtype, ReduceKind::kBxor), (std::vector<T>{1, 0, 5, static_cast<T>(-6)}));
}

TEST(Reduce, IntegersByBitwiseReductions) {
  checkBitwiseReductions<int8_t>(DType::kInt8);
  checkBitwiseReductions<int16_t>(DType::kInt16);
  checkBitwiseReductions<int32_t>(DType::kInt32);
  checkBitwiseReductions<int64_t>(DType::kInt64);
  checkBitwiseReductions<uint8_t>(DType::kUint8);
}

TEST(Reduce, HalfPrecisionSums) {
  // 1.0 + 2.0 == 3.0 as bit patterns of the two formats.
  EXPECT_EQ(reduced<uint16_t>({0x3c00}, {0x4000}, DType::kHalf, ReduceKind::kSum),
            std::vector<uint16_t>{0x4200});
  EXPECT_EQ(reduced<uint16_t>({0x3f80}, {0x4000}, DType::kBFloat16, ReduceKind::kSum),
            std::vector<uint16_t>{0x4040});
}

TEST(Reduce, BoolSumIsOrAndProductIsAnd) {
  const std::vector<uint8_t> a{0, 0, 1, 1};
  const std::vector<uint8_t> b{0, 1, 0, 1};
  const std::vector<uint8_t> any{0, 1, 1, 1};
  const std::vector<uint8_t> all{0, 0, 0, 1};
  EXPECT_EQ(reduced(a, b, DType::kBool, ReduceKind::kSum), any);
  EXPECT_EQ(reduced(a, b, DType::kBool, ReduceKind::kMax), any);
  EXPECT_EQ(reduced(a, b, DType::kBool, ReduceKind::kProduct), all);
  EXPECT_EQ(reduced(a, b, DType::kBool, ReduceKind::kMin), all);
  EXPECT_EQ(reduced(a, b, DType::kBool, ReduceKind::kBor), any);
  EXPECT_EQ(reduced(a, b, DType::kBool, ReduceKind::kBand), all);
  EXPECT_EQ(reduced(a, b, DType::kBool, ReduceKind::kBxor), (std::vector<uint8_t>{0, 1, 1, 0}));
}

TEST(Reduce, NanWinsInMinAndMax) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(reduced<float>({nan}, {1}, DType::kFloat, ReduceKind::kMax)[0]));
  EXPECT_TRUE(std::isnan(reduced<float>({1}, {nan}, DType::kFloat, ReduceKind::kMin)[0]));
}

TEST(Reduce, NothingHappensToNoBytes) {
  const float three = 3;
  float kept = 5;
  auto* const into = reinterpret_cast<uint8_t*>(&kept);
  const auto* const from = reinterpret_cast<const uint8_t*>(&three);
  reduceInto(into, from, 0, DType::kFloat, ReduceKind::kSum);
  multiplyInto(into, from, 0, DType::kFloat, from);
  divideBy(into, 0, DType::kFloat, 3);
  EXPECT_EQ(kept, 5);
  reduceInto(nullptr, nullptr, 0, DType::kFloat, ReduceKind::kSum);
  divideBy(nullptr, 0, DType::kFloat, 3);
}

TEST(Reduce, DivisionTruncatesIntegersTowardsZero) {
  EXPECT_EQ(divided<int32_t>({7, -7, 6, -1}, DType::kInt32, 3),
            (std::vector<int32_t>{2, -2, 2, 0}));
  EXPECT_EQ(divided<uint8_t>({255, 2}, DType::kUint8, 2), (std::vector<uint8_t>{127, 1}));
  // 2^53 + 1 would lose its last bit on the way through a double.
  EXPECT_EQ(divided<int64_t>({(int64_t{1} << 53) + 1}, DType::kInt64, 1),
            std::vector<int64_t>{(int64_t{1} << 53) + 1});
}

TEST(Reduce, DivisionOfFloatsIsExact) {
  EXPECT_EQ(divided<float>({1, 3, -2}, DType::kFloat, 4),
            (std::vector<float>{0.25F, 0.75F, -0.5F}));
  EXPECT_EQ(divided<uint16_t>({0x4000}, DType::kHalf, 2), std::vector<uint16_t>{0x3c00});
}

size_t threadsOfThisProcess() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/self/task")) {
    ++count;
  }
  return count;
}

template <typename T>
void checkLongSpan(DType dtype) {
  SCOPED_TRACE(toString(dtype));
  constexpr size_t kItems = 100'003;
  const std::vector<T> a(kItems, T{6});
  const std::vector<T> b(kItems, T{2});
  EXPECT_EQ(reduced(a, b, dtype, ReduceKind::kSum), std::vector<T>(kItems, T{8}));
  EXPECT_EQ(reduced(a, b, dtype, ReduceKind::kProduct), std::vector<T>(kItems, T{12}));
  EXPECT_EQ(reduced(a, b, dtype, ReduceKind::kMin), b);
  EXPECT_EQ(reduced(a, b, dtype, ReduceKind::kMax), a);
  EXPECT_EQ(divided(a, dtype, 3), std::vector<T>(kItems, T{2}));
}

TEST(Reduce, LongSpansAreReducedWholeAndStartNoThreads) {
  const size_t before = threadsOfThisProcess();
  checkLongSpan<float>(DType::kFloat);
  checkLongSpan<double>(DType::kDouble);
  checkLongSpan<int8_t>(DType::kInt8);
  checkLongSpan<int64_t>(DType::kInt64);
  std::vector<uint16_t> halves(100'003, 0x3c00);
  reduced(halves, halves, DType::kHalf, ReduceKind::kSum);
  divided(halves, DType::kBFloat16, 2);
  const std::vector<uint8_t> bools(100'003, 1);
  reduced(bools, bools, DType::kBool, ReduceKind::kSum);
  EXPECT_LE(threadsOfThisProcess(), before);  // threads of other tests may have ended
}

// ---- the bits of ATen's kernels

struct Named {
  DType dtype;
  at::ScalarType scalar;
};
constexpr Named kAll[] = {{DType::kFloat, at::kFloat}, {DType::kDouble, at::kDouble},
                          {DType::kHalf, at::kHalf},   {DType::kBFloat16, at::kBFloat16},
                          {DType::kInt8, at::kChar},   {DType::kInt16, at::kShort},
                          {DType::kInt32, at::kInt},   {DType::kInt64, at::kLong},
                          {DType::kUint8, at::kByte},  {DType::kBool, at::kBool}};

bool isFloating(DType dtype) {
  return dtype <= DType::kBFloat16;
}

// Random bits: of floating types so NaNs, infinities, zeros of both signs and subnormal numbers
// too.
std::vector<uint8_t> randomBits(std::mt19937_64& random, DType dtype, size_t items) {
  std::vector<uint8_t> bytes(items * itemSize(dtype));
  for (uint8_t& byte : bytes) {
    byte = static_cast<uint8_t>(dtype == DType::kBool ? random() % 2 : random());
  }
  if (!isFloating(dtype)) return bytes;
  const std::vector<double> special{0.0,   -0.0,     1.0,       65504.0, 65519.0, 65520.0,   6e-8,
                                    3e-8,  -6e-8,    1e-40,     3e38,    -3e38,   0.1,       1e-310,
                                    1e308, HUGE_VAL, -HUGE_VAL, NAN,     2049.0,  1.00390625};
  for (size_t i = 0; i < items; i += 3) {
    const double value = special[random() % special.size()];
    std::vector<uint8_t> item(itemSize(dtype));
    if (dtype == DType::kDouble) std::memcpy(item.data(), &value, item.size());
    const auto narrow = static_cast<float>(value);
    const at::Half half(narrow);
    const at::BFloat16 bfloat(narrow);
    if (dtype == DType::kFloat) std::memcpy(item.data(), &narrow, item.size());
    if (dtype == DType::kHalf) std::memcpy(item.data(), &half, item.size());
    if (dtype == DType::kBFloat16) std::memcpy(item.data(), &bfloat, item.size());
    std::copy(item.begin(), item.end(), bytes.begin() + static_cast<ptrdiff_t>(i * item.size()));
  }
  return bytes;
}

at::Tensor tensorOf(std::vector<uint8_t>& bytes, const Named& type) {
  return at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size() / itemSize(type.dtype))},
                       at::TensorOptions().dtype(type.scalar));
}

at::Tensor byAten(const at::Tensor& a, const at::Tensor& b, ReduceKind op) {
  const bool is_bool = a.scalar_type() == at::kBool;
  switch (op) {
    case ReduceKind::kProduct:
      return is_bool ? at::bitwise_and(a, b) : at::mul(a, b);
    case ReduceKind::kMin:
      return is_bool ? at::bitwise_and(a, b) : at::minimum(a, b);
    case ReduceKind::kMax:
      return is_bool ? at::bitwise_or(a, b) : at::maximum(a, b);
    case ReduceKind::kBand:
      return at::bitwise_and(a, b);
    case ReduceKind::kBor:
      return at::bitwise_or(a, b);
    case ReduceKind::kBxor:
      return at::bitwise_xor(a, b);
    default:
      return is_bool ? at::bitwise_or(a, b) : at::add(a, b);
  }
}

// Two NaNs are alike; in kMin and kMax two zeros are too.
bool sameBits(const at::Tensor& found, const at::Tensor& expected, bool zeros_alike) {
  const auto bits = [](const at::Tensor& tensor) {
    const auto same_size = tensor.element_size() == 8   ? at::kLong
                           : tensor.element_size() == 4 ? at::kInt
                           : tensor.element_size() == 2 ? at::kShort
                                                        : at::kByte;
    return tensor.view(same_size);
  };
  at::Tensor same = bits(found).eq(bits(expected));
  if (found.is_floating_point()) same = same | (found.isnan() & expected.isnan());
  if (zeros_alike) same = same | found.eq(expected);
  return same.all().item<bool>();
}

std::vector<const ReduceTable*> compiledTables() {
  std::vector<const ReduceTable*> tables{&baselineReductions()};
  if (const ReduceTable* const chosen = &chosenReductions(); chosen != tables[0]) {
    tables.push_back(chosen);
  }
  return tables;
}

TEST(Reduce, CombinesAsAtenDoes) {
  std::mt19937_64 random(7);
  for (const ReduceTable* const table : compiledTables()) {
    for (const Named& type : kAll) {
      for (int op = 0; op < ReduceTable::kReductions; ++op) {
        const auto combine = table->combine[static_cast<size_t>(type.dtype)][op];
        EXPECT_EQ(combine == nullptr, isFloating(type.dtype) && op >= 6);
        if (combine == nullptr) continue;
        std::vector<uint8_t> into = randomBits(random, type.dtype, 1003);
        std::vector<uint8_t> from = randomBits(random, type.dtype, 1003);
        const auto kind = static_cast<ReduceKind>(op);
        const at::Tensor expected = byAten(tensorOf(into, type), tensorOf(from, type), kind);
        combine(into.data(), from.data(), 1003);
        const bool extreme = kind == ReduceKind::kMin || kind == ReduceKind::kMax;
        EXPECT_TRUE(sameBits(tensorOf(into, type), expected, extreme))
            << toString(type.dtype) << " " << toString(kind);
      }
    }
  }
}

TEST(Reduce, MultipliesAndDividesAsAtenDoes) {
  std::mt19937_64 random(8);
  for (const ReduceTable* const table : compiledTables()) {
    for (const Named& type : kAll) {
      if (type.dtype == DType::kBool) continue;
      std::vector<uint8_t> data = randomBits(random, type.dtype, 1003);
      const auto index = static_cast<size_t>(type.dtype);
      const at::Tensor quotient = isFloating(type.dtype) ? tensorOf(data, type).div(3)
                                                         : tensorOf(data, type).div(3, "trunc");
      std::vector<uint8_t> divided = data;
      table->divide[index](divided.data(), 3, 1003);
      EXPECT_TRUE(sameBits(tensorOf(divided, type), quotient, false)) << toString(type.dtype);
      if (!isFloating(type.dtype)) continue;
      std::vector<uint8_t> factor(itemSize(type.dtype));
      tensorOf(factor, type).fill_(0.3);
      const at::Tensor product = tensorOf(data, type).mul(tensorOf(factor, type));
      table->multiply[index](data.data(), data.data(), factor.data(), 1003);
      EXPECT_TRUE(sameBits(tensorOf(data, type), product, false)) << toString(type.dtype);
    }
  }
}

// Ranks combine in different orders of the operands. Both ends: the last ones fill no vector.
TEST(Reduce, TheOrderOfZerosDoesNotMatter) {
  const std::vector<float> plus(9, 0.0F);
  const std::vector<float> minus(9, -0.0F);
  for (const auto& [a, b] : {std::pair(plus, minus), std::pair(minus, plus)}) {
    for (const size_t item : {0U, 8U}) {
      EXPECT_TRUE(std::signbit(reduced(a, b, DType::kFloat, ReduceKind::kMin)[item]));
      EXPECT_FALSE(std::signbit(reduced(a, b, DType::kFloat, ReduceKind::kMax)[item]));
    }
  }
}

TEST(Reduce, SpansOfAnyLengthAreReducedToTheirEndAndNoFurther) {
  for (const ReduceTable* const table : compiledTables()) {
    for (size_t items = 0; items < 40; ++items) {
      for (const ReduceKind op : {ReduceKind::kSum, ReduceKind::kMax}) {
        // As bfloat16s and as floats: 1 and 2, whose sum is 3.
        std::vector<uint16_t> narrow(items + 1, 0x3f80);
        std::vector<float> wide(items + 1, 1);
        const std::vector<uint16_t> narrow_from(items, 0x4000);
        const std::vector<float> wide_from(items, 2);
        table->combine[static_cast<size_t>(DType::kBFloat16)][static_cast<size_t>(op)](
            narrow.data(), narrow_from.data(), items);
        table->combine[static_cast<size_t>(DType::kFloat)][static_cast<size_t>(op)](
            wide.data(), wide_from.data(), items);
        const bool sum = op == ReduceKind::kSum;
        std::vector<uint16_t> expected_narrow(items, sum ? 0x4040 : 0x4000);
        std::vector<float> expected_wide(items, sum ? 3 : 2);
        expected_narrow.push_back(0x3f80);
        expected_wide.push_back(1);
        EXPECT_EQ(narrow, expected_narrow) << items;
        EXPECT_EQ(wide, expected_wide) << items;
      }
    }
  }
}

TEST(Reduce, MemoryNeedNotBeAligned) {
  std::vector<uint8_t> into(1 + 40 * sizeof(float));
  std::vector<uint8_t> from(3 + 40 * sizeof(float));
  const float one = 1;
  for (size_t i = 0; i < 40; ++i) std::memcpy(&from[3 + i * sizeof(one)], &one, sizeof(one));
  reduceInto(into.data() + 1, from.data() + 3, 40 * sizeof(float), DType::kFloat, ReduceKind::kSum);
  EXPECT_EQ(std::memcmp(into.data() + 1, from.data() + 3, 40 * sizeof(float)), 0);
}

TEST(Reduce, WhatHasNoArithmeticIsRefused) {
  uint8_t byte = 0;
  EXPECT_THROW(reduceInto(&byte, &byte, 1, DType::kFloat8E4M3, ReduceKind::kSum), std::logic_error);
  EXPECT_THROW(reduceInto(&byte, &byte, 0, DType::kFloat, ReduceKind::kBor), std::logic_error);
  EXPECT_THROW(divideBy(&byte, 1, DType::kBool, 2), std::logic_error);
}

}  // namespace
}  // namespace torchft_ext
