#include "staged/staging_thread.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/threads.h"
#include "staged/copy_streams.h"
#include "staged/staging_queue.h"

namespace torchft_ext {
namespace {

constexpr Duration kShortest = std::chrono::microseconds(20);
constexpr Duration kLongest = std::chrono::milliseconds(1);

using Queues = std::vector<std::shared_ptr<StagingQueue>>;

// All waits hang on this thread: nothing may end it.
StagingQueue::Progress guardedLook(StagingQueue& queue, CopyStreams& streams) noexcept {
  try {
    return queue.look(streams);
  } catch (const std::exception& error) {
    log(LogLevel::kError, std::string("a look at staged operations failed: ") + error.what());
  } catch (...) {
    log(LogLevel::kError, "a look at staged operations failed");
  }
  return {.asks_device = true};
}

class Loop {
 public:
  void attend(std::shared_ptr<StagingQueue> queue);
  void wake();
  void stop();
  void run();

 private:
  bool await(Deadline until, Queues& arrived);

  Mutex mutex_;
  CondVar changed_;
  Queues arrived_ GUARDED_BY(mutex_);
  bool woken_ GUARDED_BY(mutex_) = false;
  bool stopping_ GUARDED_BY(mutex_) = false;
};

void Loop::attend(std::shared_ptr<StagingQueue> queue) {
  MutexLock lock(mutex_);
  arrived_.push_back(std::move(queue));
  woken_ = true;
  changed_.notifyAll();
}

void Loop::wake() {
  MutexLock lock(mutex_);
  woken_ = true;
  changed_.notifyAll();
}

void Loop::stop() {
  MutexLock lock(mutex_);
  stopping_ = true;
  changed_.notifyAll();
}

// False: stopping.
bool Loop::await(Deadline until, Queues& arrived) {
  MutexLock lock(mutex_);
  while (!woken_ && !stopping_ && !until.expired()) changed_.waitUntil(mutex_, until);
  woken_ = false;
  arrived.swap(arrived_);
  return !stopping_;
}

void Loop::run() {
  CopyStreams streams;
  Queues queues;
  Queues arrived;
  Duration pause = kShortest;
  bool asks_device = false;
  while (await(asks_device ? Deadline::after(pause) : Deadline::never(), arrived)) {
    for (auto& queue : arrived) {
      if (std::find(queues.begin(), queues.end(), queue) == queues.end())
        queues.push_back(std::move(queue));
    }
    arrived.clear();
    bool moved = false;
    asks_device = false;
    for (auto queue = queues.begin(); queue != queues.end();) {
      const StagingQueue::Progress progress = guardedLook(**queue, streams);
      moved |= progress.moved;
      asks_device |= progress.asks_device;
      queue = progress.empty ? queues.erase(queue) : std::next(queue);
    }
    pause = moved ? kShortest : std::min(2 * pause, kLongest);
  }
  for (const auto& queue : queues) guardedLook(*queue, streams);
}

struct Shared {
  Mutex mutex;
  std::shared_ptr<Loop> loop GUARDED_BY(mutex);  // null: there is no thread
  OwnedThread thread GUARDED_BY(mutex);
  StagingCounts counts GUARDED_BY(mutex);
};
PerProcess<Shared> process;

std::shared_ptr<Loop> running() {
  Shared& shared = process.get();
  MutexLock lock(shared.mutex);
  return shared.loop;
}

std::shared_ptr<Loop> started() {
  Shared& shared = process.get();
  MutexLock lock(shared.mutex);
  if (!shared.loop) {
    auto loop = std::make_shared<Loop>();
    shared.thread = OwnedThread("ft-staging", [loop] { loop->run(); });
    shared.loop = std::move(loop);
  }
  return shared.loop;
}

}  // namespace

void StagingThread::start() {
  started();
}

void StagingThread::attend(std::shared_ptr<StagingQueue> queue) {
  started()->attend(std::move(queue));
}

void StagingThread::wake() {
  if (const auto loop = running()) loop->wake();
}

bool StagingThread::isSelf() {
  Shared& shared = process.get();
  MutexLock lock(shared.mutex);
  return shared.loop && shared.thread.isSelf();
}

void StagingThread::count(const StagingCounts& more) {
  Shared& shared = process.get();
  MutexLock lock(shared.mutex);
  shared.counts += more;
}

StagingCounts StagingThread::counts() {
  Shared& shared = process.get();
  MutexLock lock(shared.mutex);
  return shared.counts;
}

bool StagingThread::stop(Deadline deadline) {
  Shared& shared = process.get();
  OwnedThread thread;
  std::shared_ptr<Loop> loop;
  {
    MutexLock lock(shared.mutex);
    loop.swap(shared.loop);
    thread = std::move(shared.thread);
  }
  if (!loop) return true;
  loop->stop();
  if (thread.join(deadline)) return true;
  thread.abandon("a call into the device does not return");
  return false;
}

}  // namespace torchft_ext
