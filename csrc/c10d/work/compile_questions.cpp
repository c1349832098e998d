#include "c10d/work/compile_questions.h"

#include <algorithm>

namespace torchft_ext {
namespace {

// One that is under way on this thread.
struct Compilation {
  CompileQuestions own;
  Compilation* outer = nullptr;
};
thread_local Compilation* innermost = nullptr;
thread_local int aside = 0;

}  // namespace

thread_local bool CompileQuestions::wanted_ = false;

void CompileQuestions::refresh() {
  wanted_ = innermost != nullptr && aside == 0;
}

void CompileQuestions::begin() {
  auto fresh = std::make_unique<Compilation>();
  fresh->outer = innermost;
  innermost = fresh.release();  // end() has it
  refresh();
}

void CompileQuestions::end() {
  const std::unique_ptr<Compilation> ended(innermost);
  if (ended) innermost = ended->outer;
  refresh();
}

void CompileQuestions::setAside(bool begins) {
  aside += begins ? 1 : -1;
  refresh();
}

std::shared_ptr<CompileQuestions> CompileQuestions::taken() {
  if (innermost == nullptr || innermost->own.questions_.empty()) return nullptr;
  return std::make_shared<CompileQuestions>(innermost->own);
}

void CompileQuestions::note(Of of, int answer, Now now) {
  if (innermost != nullptr) innermost->own.questions_.push_back({of, answer, std::move(now)});
}

bool CompileQuestions::hold() const {
  return std::all_of(questions_.begin(), questions_.end(),
                     [](const Question& question) { return question.now() == question.answer; });
}

bool CompileQuestions::askedForRank() const {
  return std::any_of(questions_.begin(), questions_.end(),
                     [](const Question& question) { return question.of == Of::kRank; });
}

}  // namespace torchft_ext
