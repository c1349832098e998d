#include "host/sparse_merge.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>

#include "host/reduce.h"

namespace torchft_ext {
namespace {

// What a rank gives: rows of `row` floats at sorted cells of a matrix of sparse dimensions.
struct Given {
  std::vector<int64_t> indices;  // [2][rows]
  std::vector<float> values;
  size_t rows = 0;
  SparsePart part() const {
    return {indices.data(), reinterpret_cast<const uint8_t*>(values.data()), rows};
  }
};

constexpr int64_t kColumns = 7;

Given givenAt(const std::vector<int64_t>& cells, size_t row, std::mt19937& random) {
  Given given;
  given.rows = cells.size();
  for (const int64_t cell : cells) given.indices.push_back(cell / kColumns);
  for (const int64_t cell : cells) given.indices.push_back(cell % kColumns);
  for (size_t i = 0; i < given.rows * row; ++i)
    given.values.push_back(static_cast<float>(random() % 1000) / 7.0F);
  return given;
}

struct Merged {
  std::vector<int64_t> indices;
  std::vector<float> values;
  int turns = 0;
};

Merged merge(const std::vector<Given>& ranks, size_t row, size_t budget_per_turn) {
  std::vector<SparsePart> parts;
  for (const Given& given : ranks) parts.push_back(given.part());
  SparseMerge merge(parts, {100, kColumns}, row * sizeof(float), DType::kFloat);
  Merged merged;
  const auto inTurns = [&](const std::function<bool(size_t*)>& some) {
    for (bool done = false; !done; ++merged.turns) {
      size_t budget = budget_per_turn;
      done = some(&budget);
    }
  };
  inTurns([&](size_t* budget) { return merge.number(budget); });
  merged.indices.resize(2 * merge.rows());
  merged.values.resize(merge.rows() * row);
  inTurns([&](size_t* budget) {
    return merge.sum(merged.indices.data(), reinterpret_cast<uint8_t*>(merged.values.data()),
                     budget);
  });
  return merged;
}

std::vector<int64_t> drawCells(std::mt19937& random, size_t most) {
  std::map<int64_t, bool> cells;
  for (size_t left = random() % (most + 1); left > 0; --left) cells[random() % 200] = true;
  std::vector<int64_t> sorted;
  for (const auto& cell : cells) sorted.push_back(cell.first);
  return sorted;
}

// The reference: by cell, in the order of the ranks.
Merged expectedOf(const std::vector<Given>& ranks, size_t row) {
  std::map<int64_t, std::vector<float>> by_cell;
  for (const Given& given : ranks) {
    for (size_t i = 0; i < given.rows; ++i) {
      const int64_t cell = given.indices[i] * kColumns + given.indices[given.rows + i];
      const float* values = given.values.data() + i * row;
      const auto [found, first] = by_cell.try_emplace(cell, values, values + row);
      for (size_t j = 0; j < row && !first; ++j) found->second[j] += values[j];
    }
  }
  Merged expected;
  for (const auto& cell : by_cell) expected.indices.push_back(cell.first / kColumns);
  for (const auto& cell : by_cell) expected.indices.push_back(cell.first % kColumns);
  for (const auto& [cell, values] : by_cell)
    expected.values.insert(expected.values.end(), values.begin(), values.end());
  return expected;
}

TEST(SparseMerge, AddsRowsOfOneCellInTheOrderOfTheRanks) {
  std::mt19937 random(5);
  for (const size_t row : {size_t{1}, size_t{3}, size_t{0}}) {
    for (int draw = 0; draw < 200; ++draw) {
      std::vector<Given> ranks;
      for (size_t left = 1 + random() % 5; left > 0; --left)
        ranks.push_back(givenAt(drawCells(random, 60), row, random));
      const Merged expected = expectedOf(ranks, row);
      const Merged found = merge(ranks, row, SIZE_MAX);
      EXPECT_EQ(found.indices, expected.indices);
      EXPECT_EQ(found.values, expected.values);  // bit by bit
    }
  }
}

TEST(SparseMerge, GivesTheSameInPieces) {
  std::mt19937 random(6);
  const std::vector<Given> ranks{givenAt({1, 5, 8}, 2, random), givenAt({0, 5, 9}, 2, random)};
  const Merged at_once = merge(ranks, 2, SIZE_MAX);
  const Merged in_pieces = merge(ranks, 2, 1);
  EXPECT_EQ(at_once.turns, 2);
  EXPECT_GT(in_pieces.turns, 10);
  EXPECT_EQ(in_pieces.indices, at_once.indices);
  EXPECT_EQ(in_pieces.values, at_once.values);
}

TEST(SparseMerge, TellsWhoseIndicesAreOutOfOrder) {
  std::mt19937 random(7);
  const Given good = givenAt({1, 5, 8}, 1, random);
  const Given bad = givenAt({5, 1, 8}, 1, random);
  SparseMerge merge({good.part(), bad.part()}, {100, kColumns}, sizeof(float), DType::kFloat);
  size_t budget = SIZE_MAX;
  EXPECT_TRUE(merge.number(&budget));
  EXPECT_EQ(merge.unordered(), 1);
}

}  // namespace
}  // namespace torchft_ext
