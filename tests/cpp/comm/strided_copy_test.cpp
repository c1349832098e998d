#include "comm/strided_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <string>

namespace torchft_ext {
namespace {

struct Shape {
  const char* name;
  size_t item;
  std::vector<size_t> sizes;
  std::vector<size_t> strides;  // in items
};

const Shape kShapes[] = {
    {"a scalar", 4, {}, {}},
    {"as it lies", 4, {3, 5}, {5, 1}},
    {"nothing", 4, {3, 0, 2}, {1, 1, 1}},
    {"transposed", 8, {5, 3}, {1, 5}},
    {"permuted", 2, {2, 3, 4, 5}, {60, 1, 15, 3}},
    {"with gaps", 1, {4, 7}, {15, 2}},
    {"rows with gaps", 4, {2, 3, 5}, {24, 8, 1}},
    {"dimensions of one", 4, {1, 3, 1, 5}, {99, 1, 77, 3}},
    {"long items", 16, {3, 5}, {1, 3}},
    {"odd items", 3, {3, 5}, {1, 3}},
};

size_t countOf(const Shape& shape) {
  return std::accumulate(shape.sizes.begin(), shape.sizes.end(), size_t{1}, std::multiplies<>());
}

// Where item number `index` lies, in bytes.
size_t offsetOf(const Shape& shape, size_t index) {
  size_t offset = 0;
  for (size_t dim = shape.sizes.size(); dim-- > 0;) {
    offset += index % shape.sizes[dim] * shape.strides[dim];
    index /= shape.sizes[dim];
  }
  return offset * shape.item;
}

constexpr size_t kRoom = 4096;

std::vector<uint8_t> pattern(size_t bytes) {
  std::vector<uint8_t> values(bytes);
  for (size_t i = 0; i < bytes; ++i) values[i] = static_cast<uint8_t>(i * 7 + i / 251 + 1);
  return values;
}

StridedMemory memoryOf(const Shape& shape, uint8_t* data) {
  StridedMemory memory{data, shape.item, shape.sizes, shape.strides};
  for (size_t& stride : memory.strides) stride *= shape.item;
  return memory;
}

// How many turns it took.
int runInTurns(StridedCopy copy, size_t per_turn) {
  int turns = 1;
  for (size_t budget = per_turn; !copy.run(&budget); budget = per_turn) ++turns;
  return turns;
}

class StridedCopyTest : public ::testing::TestWithParam<size_t> {};

TEST_P(StridedCopyTest, LoadsInTheOrderOfIndices) {
  for (const Shape& shape : kShapes) {
    std::vector<uint8_t> strided = pattern(kRoom);
    std::vector<uint8_t> loaded(countOf(shape) * shape.item);
    runInTurns(StridedCopy::load(memoryOf(shape, strided.data()), loaded.data()), GetParam());
    for (size_t i = 0; i < countOf(shape); ++i)
      ASSERT_EQ(std::memcmp(&loaded[i * shape.item], &strided[offsetOf(shape, i)], shape.item), 0)
          << shape.name << ", item " << i;
  }
}

TEST_P(StridedCopyTest, StoresToTheSamePlacesAndNoOthers) {
  for (const Shape& shape : kShapes) {
    std::vector<uint8_t> values = pattern(countOf(shape) * shape.item);
    std::vector<uint8_t> strided(kRoom, 0);
    std::vector<uint8_t> expected(kRoom, 0);
    for (size_t i = 0; i < countOf(shape); ++i)
      std::memcpy(&expected[offsetOf(shape, i)], &values[i * shape.item], shape.item);
    runInTurns(StridedCopy::store(values.data(), memoryOf(shape, strided.data())), GetParam());
    ASSERT_EQ(strided, expected) << shape.name;
  }
}

INSTANTIATE_TEST_SUITE_P(BytesPerTurn, StridedCopyTest, ::testing::Values(1, 5, 16, 33, kRoom));

TEST(StridedCopy, StopsWhenItsBudgetIsSpent) {
  std::vector<uint8_t> strided = pattern(kRoom);
  std::vector<uint8_t> loaded(1000);
  const StridedMemory gaps{strided.data(), 1, {1000}, {3}};
  EXPECT_EQ(runInTurns(StridedCopy::load(gaps, loaded.data()), 300), 4);
  StridedCopy copy = StridedCopy::load(gaps, loaded.data());
  size_t budget = 1100;
  EXPECT_TRUE(copy.run(&budget));
  EXPECT_EQ(budget, 100U);
}

TEST(StridedCopy, SeveralShareABudget) {
  std::vector<uint8_t> strided = pattern(kRoom);
  std::vector<uint8_t> loaded(200);
  const StridedMemory gaps{strided.data(), 1, {100}, {2}};
  std::vector<StridedCopy> copies{StridedCopy::load(gaps, loaded.data()),
                                  StridedCopy::load(gaps, loaded.data() + 100)};
  size_t budget = 150;
  EXPECT_FALSE(runAll(copies, &budget));
  budget = 50;
  EXPECT_TRUE(runAll(copies, &budget));
  EXPECT_TRUE(std::equal(loaded.begin(), loaded.begin() + 100, loaded.begin() + 100));
}

}  // namespace
}  // namespace torchft_ext
