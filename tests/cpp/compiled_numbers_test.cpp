#include "c10d/compiled_numbers.h"

#include <gtest/gtest.h>

#include <thread>

namespace torchft_ext {
namespace {

struct Compiling {
  Compiling() { CompiledNumbers::setCompiling(true); }
  ~Compiling() { CompiledNumbers::setCompiling(false); }
};

TEST(CompiledNumbersTest, AnAnswerBesideACompilationBindsNothing) {
  CompiledNumbers numbers;
  EXPECT_EQ(numbers.answerRank(1), 1);
  EXPECT_EQ(numbers.answerSize(4), 4);
  EXPECT_FALSE(numbers.outdatedBy(0, 3));
}

TEST(CompiledNumbersTest, OnlyWhatWasAskedForIsOutdated) {
  CompiledNumbers numbers;
  {
    const Compiling now;
    EXPECT_EQ(numbers.answerSize(4), 4);
  }
  EXPECT_FALSE(numbers.outdatedBy(0, 4));
  EXPECT_FALSE(numbers.outdatedBy(3, 4));
  EXPECT_TRUE(numbers.outdatedBy(0, 3));
}

TEST(CompiledNumbersTest, WhatAThreadAsksAsideBindsNothing) {
  CompiledNumbers numbers;
  const Compiling now;
  CompiledNumbers::setAside(true);
  numbers.answerRank(2);
  EXPECT_FALSE(numbers.outdatedBy(1, 4));
  std::thread([&] { numbers.answerSize(4); }).join();
  CompiledNumbers::setAside(false);
  EXPECT_TRUE(numbers.outdatedBy(1, 3));
  EXPECT_FALSE(numbers.outdatedBy(1, 4));
  numbers.answerRank(2);
  EXPECT_TRUE(numbers.outdatedBy(1, 4));
}

TEST(CompiledNumbersTest, NestedCompilationsEndWithTheLast) {
  CompiledNumbers numbers;
  const Compiling outer;
  { const Compiling inner; }
  numbers.answerRank(2);
  EXPECT_TRUE(numbers.outdatedBy(1, 4));
}

TEST(CompiledNumbersTest, FunctionsOfTwoEpochsCannotBothBeRight) {
  CompiledNumbers numbers;
  const Compiling now;
  numbers.answerSize(4);
  numbers.answerSize(3);
  EXPECT_TRUE(numbers.outdatedBy(0, 3));
  EXPECT_TRUE(numbers.outdatedBy(0, 4));
}

TEST(CompiledNumbersTest, WhatIsForgottenBindsNothingAndIsNotedAnew) {
  CompiledNumbers numbers;
  CompiledNumbers another;
  const Compiling now;
  numbers.answerSize(4);
  another.answerRank(1);
  CompiledNumbers::forgetAll();
  EXPECT_FALSE(numbers.outdatedBy(0, 3));
  EXPECT_FALSE(another.outdatedBy(0, 3));
  numbers.answerSize(3);
  EXPECT_FALSE(numbers.outdatedBy(0, 3));
  EXPECT_TRUE(numbers.outdatedBy(0, 2));
}

}  // namespace
}  // namespace torchft_ext
