#include "base/task_thread.h"

#include <exception>
#include <utility>

#include "base/fork.h"
#include "base/log.h"

namespace torchft_ext {

struct TaskThread::Shared {
  explicit Shared(std::string thread_name) : name(std::move(thread_name)) {}

  const std::string name;
  const uint64_t fork_count = forkCount();
  Mutex mutex;
  CondVar changed;
  std::deque<std::function<void()>> tasks GUARDED_BY(mutex);
  bool stopping GUARDED_BY(mutex) = false;

  bool inherited() const {
    return fork_count != forkCount();
  }  // then the mutex may be held for good
  bool next(std::function<void()>* task) EXCLUDES(mutex);
  void runAll();
  void runOne(std::function<void()> task) noexcept;
};

bool TaskThread::Shared::next(std::function<void()>* task) {
  MutexLock lock(mutex);
  while (tasks.empty() && !stopping) changed.waitUntil(mutex, Deadline::never());
  if (tasks.empty()) return false;
  *task = std::move(tasks.front());
  tasks.pop_front();
  return true;
}

void TaskThread::Shared::runAll() {
  std::function<void()> task;
  while (next(&task)) runOne(std::exchange(task, nullptr));
}

void TaskThread::Shared::runOne(std::function<void()> task) noexcept {
  try {
    task();
    task = nullptr;
  } catch (const std::exception& error) {
    log(LogLevel::kError, "a task on thread " + name + " threw: " + error.what());
  } catch (...) {
    log(LogLevel::kError, "a task on thread " + name + " threw an exception of unknown type");
  }
}

TaskThread::TaskThread(std::string name)
    : shared_(std::make_shared<Shared>(name)),
      thread_(std::move(name), [shared = shared_] { shared->runAll(); }) {}

TaskThread::~TaskThread() {
  if (!stop(Deadline::after(std::chrono::seconds(1)))) {
    thread_.abandon("a task had not returned when its owner was destroyed");
  }
}

bool TaskThread::post(std::function<void()> task) {
  if (shared_->inherited()) return false;
  MutexLock lock(shared_->mutex);
  if (shared_->stopping) return false;
  shared_->tasks.push_back(std::move(task));
  shared_->changed.notifyAll();
  return true;
}

bool TaskThread::stop(Deadline deadline) {
  if (shared_->inherited()) return true;
  {
    MutexLock lock(shared_->mutex);
    shared_->stopping = true;
    shared_->changed.notifyAll();
  }
  return thread_.join(deadline);
}

}  // namespace torchft_ext
