// What torch.compile asks groups for: it asks for a rank or size while it traces, makes a constant
// of the answer, and never asks again. So the questions of a compilation are kept, and guard what
// it made (torchft_ext/_compiled.py, which also says when a compilation begins and ends).
//
// Owner: of the questions of a compilation under way, its thread; of those taken, Python's guard.
// Threads: a compilation asks on its own thread; hold() any. Nothing blocks; where nothing is being
// compiled an answer costs one look at a variable of the thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torchft_ext {

class CompileQuestions {
 public:
  enum class Of { kRank, kSize };
  using Now = std::function<std::optional<int>()>;  // nullopt: the group is gone

  // On the compiling thread; they nest, and each has questions of its own.
  static void begin();
  static void end();
  // What the thread asks from here on is not for what it compiles, or is again.
  static void setAside(bool begins);
  // Those of the innermost compilation so far; null: there are none.
  static std::shared_ptr<CompileQuestions> taken();

  static bool wanted() { return wanted_; }
  static void note(Of of, int answer, Now now);

  // Whether all answers would be the same now.
  bool hold() const;
  bool askedForRank() const;

 private:
  struct Question {
    Of of;
    int answer;
    Now now;
  };
  static void refresh();
  static thread_local bool wanted_;
  std::vector<Question> questions_;
};

}  // namespace torchft_ext
