#include "base/log.h"

#include <atomic>
#include <cstdio>
#include <memory>
#include <system_error>
#include <utility>

#include "base/fork.h"
#include "base/mutex.h"
#include "base/task_thread.h"

namespace torchft_ext {
namespace {

constexpr size_t kMostWaiting = 1000;

// Not freed: a call of it may be under way, and a lock that guards it may be held for good in a
// forked child.
struct ChosenSink {
  LogSink sink;
  const ChosenSink* before;  // keeps that one reachable, for leak checkers
};

constexpr int kNoLevelChosen = -1;

std::atomic<const ChosenSink*> chosen_sink{nullptr};  // the last one is in force, if not empty
std::atomic<LogDestination> default_destination{nullptr};
std::atomic<int> least_level{kNoLevelChosen};

bool isWanted(LogLevel level) {
  return static_cast<int>(level) >= least_level.load();
}

void writeToStderr(LogLevel level, const std::string& line) {
  const bool shows_all = least_level.load() != kNoLevelChosen;
  if (level == LogLevel::kInfo && !shows_all) return;
  const char* name = level == LogLevel::kInfo      ? "info"
                     : level == LogLevel::kWarning ? "warning"
                                                   : "error";
  std::fprintf(stderr, "torchft_ext %s: %s\n", name, line.c_str());
}

void write(LogLevel level, const std::string& line) noexcept {
  if (!isWanted(level)) return;
  try {
    const ChosenSink* const chosen = chosen_sink.load(std::memory_order_acquire);
    const LogDestination destination = default_destination.load();
    if (chosen != nullptr && chosen->sink) {
      chosen->sink(level, line);
    } else if (destination != nullptr) {
      destination(level, line);
    } else {
      writeToStderr(level, line);
    }
  } catch (...) {
    writeToStderr(LogLevel::kError, line);  // the sink failed: the line must not be lost with it
  }
}

// Lines on their way to the thread that writes them.
class Writer {
 public:
  // False: there is no thread, the caller writes.
  bool take(LogLevel level, const std::string& line);
  void start();
  bool stop(Deadline deadline);

 private:
  void writeNext(LogLevel level, const std::string& line) noexcept;

  // TaskThread's and the registry of threads take theirs under it.
  Mutex mutex_;
  std::unique_ptr<TaskThread> thread_ GUARDED_BY(mutex_);
  size_t waiting_ GUARDED_BY(mutex_) = 0;
  size_t dropped_ GUARDED_BY(mutex_) = 0;
  bool silent_ GUARDED_BY(mutex_) = false;  // a line never ended: another would not either
};

bool Writer::take(LogLevel level, const std::string& line) {
  MutexLock lock(mutex_);
  if (silent_) return true;
  if (!thread_) return false;
  if (waiting_ == kMostWaiting) {
    ++dropped_;
    return true;
  }
  if (!thread_->post([this, level, line] { writeNext(level, line); })) return false;
  ++waiting_;
  return true;
}

void Writer::writeNext(LogLevel level, const std::string& line) noexcept {
  write(level, line);
  size_t dropped = 0;
  {
    MutexLock lock(mutex_);
    --waiting_;
    dropped = std::exchange(dropped_, 0);
  }
  if (dropped > 0)
    write(LogLevel::kWarning, std::to_string(dropped) + " lines of the log were dropped here");
}

void Writer::start() {
  MutexLock lock(mutex_);
  if (thread_ || silent_) return;
  try {
    thread_ = std::make_unique<TaskThread>("ft-log");
  } catch (const std::system_error&) {
    return;  // no room for a thread: callers go on writing
  }
}

bool Writer::stop(Deadline deadline) {
  std::unique_ptr<TaskThread> ending;
  {
    MutexLock lock(mutex_);
    ending = std::move(thread_);
  }
  if (!ending || ending->stop(deadline)) return true;
  {
    MutexLock lock(mutex_);
    silent_ = true;
  }
  // For its destructor would wait again, and say in the log that it was in vain.
  static_cast<void>(ending.release());
  return false;
}

PerProcess<Writer> per_process;

}  // namespace

void setLogSink(LogSink sink) {
  auto* const chosen = new ChosenSink{std::move(sink), chosen_sink.load(std::memory_order_acquire)};
  while (!chosen_sink.compare_exchange_weak(chosen->before, chosen, std::memory_order_acq_rel)) {
  }
}

void setLogLevel(LogLevel least) {
  least_level.store(static_cast<int>(least));
}

void setDefaultLogDestination(LogDestination destination) {
  default_destination.store(destination);
}

void log(LogLevel level, const std::string& line) noexcept {
  if (!isWanted(level)) return;
  try {
    if (per_process.get().take(level, line)) return;
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for a copy of the line
  }
  write(level, line);
}

void startLogThread() {
  per_process.get().start();
}

bool stopLogThread(Deadline deadline) {
  return per_process.get().stop(deadline);
}

}  // namespace torchft_ext
