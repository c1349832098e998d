#include "comm/callbacks.h"

#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "base/fork.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/task_thread.h"

namespace torchft_ext {
namespace {

class CallbackThread {
 public:
  // Null: stopped.
  std::shared_ptr<TaskThread> startedOnce() {
    MutexLock lock(mutex_);
    if (!thread_ && !stopped_) thread_ = std::make_shared<TaskThread>("ft-callback");
    return stopped_ ? nullptr : thread_;
  }
  // Null: never used.
  std::shared_ptr<TaskThread> ifStarted() {
    MutexLock lock(mutex_);
    return thread_;
  }
  std::shared_ptr<TaskThread> stop() {
    MutexLock lock(mutex_);
    stopped_ = true;
    return thread_;
  }

 private:
  Mutex mutex_;  // the registry of threads takes its own under it, when the thread starts
  // Kept after stop(): dropped nowhere, so that no thread can become its last owner.
  std::shared_ptr<TaskThread> thread_ GUARDED_BY(mutex_);
  bool stopped_ GUARDED_BY(mutex_) = false;
};

PerProcess<CallbackThread> callback_thread;

// When the present callback began, by Clock; 0: none runs.
std::atomic<Clock::rep> present_began{0};

struct Present {
  Present() { present_began = Clock::now().time_since_epoch().count(); }
  ~Present() { present_began = 0; }
  Present(const Present&) = delete;
  Present& operator=(const Present&) = delete;
};

void runGuarded(const std::function<void()>& callback) noexcept {
  const Present present;
  try {
    callback();
  } catch (const std::exception& error) {
    log(LogLevel::kError, std::string("a callback of a finished operation threw: ") + error.what());
  } catch (...) {
    log(LogLevel::kError, "a callback of a finished operation threw");
  }
}

}  // namespace

bool runOnCallbackThread(std::function<void()> callback) {
  try {
    const auto thread = callback_thread.get().startedOnce();
    return thread && thread->post([callback = std::move(callback)] { runGuarded(callback); });
  } catch (const std::exception& error) {
    log(LogLevel::kError,
        std::string("a callback of a finished operation was dropped: ") + error.what());
    return false;
  }
}

bool onCallbackThread() {
  const auto thread = callback_thread.get().ifStarted();
  return thread && thread->isSelf();
}

Duration presentCallbackRunsFor() {
  const Clock::rep began = present_began;
  return began == 0 ? Duration::zero() : Clock::now().time_since_epoch() - Clock::duration(began);
}

bool stopCallbackThread(Deadline deadline) {
  const auto thread = callback_thread.get().stop();
  return !thread || thread->stop(deadline);
}

}  // namespace torchft_ext
