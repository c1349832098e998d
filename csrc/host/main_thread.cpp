#include "host/main_thread.h"

#include "base/fork.h"
#include "base/main_thread_waits.h"
#include "base/mutex.h"
#include "liveness/process_state.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {
namespace {

MainThread stateOf(char letter) {
  switch (letter) {
    case 'R':
      return MainThread::kRuns;
    case 'S':
      return MainThread::kSleeps;
    case 'D':
      return MainThread::kBlocked;
    case 'T':
    case 't':
      return MainThread::kStopped;
    case 'Z':
    case 'X':
      return MainThread::kEnded;
    default:
      return MainThread::kUnknown;
  }
}

// When it was first seen to have run so many times, and no more.
class LastTurn {
 public:
  Duration age(uint64_t turns) {
    const auto now = Clock::now();
    const MutexLock lock(mutex_);
    if (turns != turns_) {
      turns_ = turns;
      seen_ = now;
    }
    return now - seen_;
  }

 private:
  Mutex mutex_;
  uint64_t turns_ GUARDED_BY(mutex_) = 0;
  Clock::time_point seen_ GUARDED_BY(mutex_) = Clock::now();
};

PerProcess<LastTurn> last_turn;  // a forked child has another main thread

const char* wordsFor(MainThread state) {
  switch (state) {
    case MainThread::kUnknown:
      break;
    case MainThread::kWaits:
      return "its main thread waits in the library";
    case MainThread::kRuns:
      return "its main thread runs";
    case MainThread::kSleeps:
      return "its main thread sleeps";
    case MainThread::kBlocked:
      return "its main thread is in uninterruptible sleep";
    case MainThread::kStopped:
      return "its main thread is stopped";
    case MainThread::kEnded:
      return "its main thread has ended";
  }
  return "";
}

}  // namespace

std::string describe(const MainThreadNow& now) {
  const std::string words = wordsFor(now.state);
  const auto seconds = std::chrono::floor<std::chrono::seconds>(now.for_at_least);
  return seconds.count() == 0 ? words : words + ", for at least " + formatSeconds(seconds);
}

MainThreadNow mainThreadNow() {
  if (mainThreadWaits()) return {MainThread::kWaits};
  const ThreadSample sample = sampleMainThread();
  MainThreadNow now{stateOf(sample.letter)};
  const Duration age = last_turn.get().age(sample.turns);
  if (now.state == MainThread::kSleeps && sample.turns != 0) now.for_at_least = age;
  return now;
}

}  // namespace torchft_ext
