#include "c10d/work/compile_questions.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <thread>

namespace torchft_ext {
namespace {

using Of = CompileQuestions::Of;

struct Compiling {
  Compiling() { CompileQuestions::begin(); }
  ~Compiling() { CompileQuestions::end(); }
  Compiling(const Compiling&) = delete;
};

// A group, as far as it is asked.
struct Asked {
  std::optional<int> number = 4;
  void ask(Of of = Of::kSize) {
    if (CompileQuestions::wanted()) CompileQuestions::note(of, *number, [this] { return number; });
  }
};

TEST(CompileQuestionsTest, NothingIsNotedBesideACompilation) {
  Asked group;
  group.ask();
  EXPECT_EQ(CompileQuestions::taken(), nullptr);
  const Compiling now;
  EXPECT_EQ(CompileQuestions::taken(), nullptr);
}

TEST(CompileQuestionsTest, AnswersHoldAsLongAsTheyWouldBeTheSame) {
  Asked group;
  std::shared_ptr<CompileQuestions> taken;
  {
    const Compiling now;
    group.ask();
    taken = CompileQuestions::taken();
  }
  ASSERT_NE(taken, nullptr);
  EXPECT_TRUE(taken->hold());
  EXPECT_FALSE(taken->askedForRank());
  group.number = 3;
  EXPECT_FALSE(taken->hold());
  group.number = 4;
  EXPECT_TRUE(taken->hold());
  group.number.reset();  // it is gone
  EXPECT_FALSE(taken->hold());
}

TEST(CompileQuestionsTest, NestedCompilationsHaveQuestionsOfTheirOwn) {
  Asked outer_group;
  Asked inner_group;
  const Compiling outer;
  outer_group.ask(Of::kRank);
  {
    const Compiling inner;
    inner_group.ask();
    EXPECT_FALSE(CompileQuestions::taken()->askedForRank());
  }
  const auto taken = CompileQuestions::taken();
  EXPECT_TRUE(taken->askedForRank());
  inner_group.number = 1;
  EXPECT_TRUE(taken->hold());
}

TEST(CompileQuestionsTest, WhatIsAskedAsideOrByAnotherThreadIsNotForIt) {
  Asked group;
  const Compiling now;
  CompileQuestions::setAside(true);
  group.ask();
  CompileQuestions::setAside(false);
  std::thread([&] { group.ask(); }).join();
  EXPECT_EQ(CompileQuestions::taken(), nullptr);
  group.ask();
  EXPECT_NE(CompileQuestions::taken(), nullptr);
}

}  // namespace
}  // namespace torchft_ext
