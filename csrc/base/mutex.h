// Locks that clang's thread-safety analysis understands (-Wthread-safety). No other lock type is
// used in the project. They never block in a destructor and know nothing of what they guard.
//
// Global order: a thread that holds one of these takes no second one, with the exceptions written
// beside the field concerned. No lock is held over a callback, a store call or Python.
#pragma once

#include <condition_variable>
#include <mutex>

#include "base/deadline.h"

#if defined(__clang__)
#define TFT_ATTRIBUTE(x) __attribute__((x))
#else
#define TFT_ATTRIBUTE(x)
#endif

#define CAPABILITY(x) TFT_ATTRIBUTE(capability(x))
#define SCOPED_CAPABILITY TFT_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(x) TFT_ATTRIBUTE(guarded_by(x))
#define REQUIRES(...) TFT_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) TFT_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) TFT_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) TFT_ATTRIBUTE(release_capability(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS TFT_ATTRIBUTE(no_thread_safety_analysis)

namespace torchft_ext {

class CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// A condition variable for Mutex. waitUntil() may wake spuriously: call it in a loop that tests the
// condition and the deadline.
class CondVar {
 public:
  void notifyAll() { condition_.notify_all(); }

  void waitUntil(Mutex& mutex, Deadline deadline) REQUIRES(mutex) NO_THREAD_SAFETY_ANALYSIS {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    if (deadline.isNever()) {
      condition_.wait(lock);
    } else {
      condition_.wait_until(lock, deadline.at());
    }
    lock.release();
  }

 private:
  std::condition_variable condition_;
};

}  // namespace torchft_ext
