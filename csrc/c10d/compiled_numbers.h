// What torch.compile has made constants of: it asks a group for its rank and size while it traces,
// writes down the answer, and never asks again. An epoch with other numbers has to undo that
// (torchft_ext/_compiled.py, which also says when a function is being compiled).
//
// Owner: the backend whose numbers they are. Threads: any. It never blocks for long; where nothing
// is being compiled an answer costs one relaxed load.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/mutex.h"

namespace torchft_ext {

class CompiledNumbers {
 public:
  // A function is being compiled from here on, or no longer; calls are counted. Of the process.
  static void setCompiling(bool begins);
  // What the calling thread asks from here on is for no compiled function, or is again.
  static void setAside(bool begins);
  // No compiled function is left in the process.
  static void forgetAll();

  int answerRank(int rank) {
    if (compiling_.load(std::memory_order_relaxed) > 0) note(&Noted::rank, rank);
    return rank;
  }
  int answerSize(int size) {
    if (compiling_.load(std::memory_order_relaxed) > 0) note(&Noted::size, size);
    return size;
  }
  // Whether some compiled function may hold another rank or size than these.
  bool outdatedBy(int rank, int size) const;

 private:
  static constexpr int kNone = -1;
  struct Noted {
    uint64_t since = 0;  // forgetAll() was called so often before
    int rank = kNone;
    int size = kNone;
    bool several = false;  // answers that differ
  };
  void note(int Noted::*number, int answer);

  static std::atomic<int> compiling_;
  static std::atomic<uint64_t> forgotten_;
  mutable Mutex mutex_;
  Noted noted_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
