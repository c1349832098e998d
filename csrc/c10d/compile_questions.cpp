#include "c10d/compile_questions.h"

#include <algorithm>

namespace torchft_ext {
namespace {

struct Thread {
  std::vector<CompileQuestions> under_way;  // the innermost last
  int aside = 0;
};

Thread& thisThread() {
  thread_local Thread thread;
  return thread;
}

}  // namespace

thread_local bool CompileQuestions::wanted_ = false;

void CompileQuestions::refresh() {
  const Thread& thread = thisThread();
  wanted_ = !thread.under_way.empty() && thread.aside == 0;
}

void CompileQuestions::begin() {
  thisThread().under_way.emplace_back();
  refresh();
}

void CompileQuestions::end() {
  auto& under_way = thisThread().under_way;
  if (!under_way.empty()) under_way.pop_back();
  refresh();
}

void CompileQuestions::setAside(bool begins) {
  thisThread().aside += begins ? 1 : -1;
  refresh();
}

std::shared_ptr<CompileQuestions> CompileQuestions::taken() {
  const auto& under_way = thisThread().under_way;
  if (under_way.empty() || under_way.back().questions_.empty()) return nullptr;
  return std::make_shared<CompileQuestions>(under_way.back());
}

void CompileQuestions::note(Of of, int answer, Now now) {
  auto& under_way = thisThread().under_way;
  if (under_way.empty()) return;
  under_way.back().questions_.push_back({of, answer, std::move(now)});
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
