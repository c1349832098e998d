// Who is told of a group's failures: at most one callback, which may be exchanged at any time.
//
// Owner: the group's user-facing object; shared, since generations tell it on other threads.
// Threads: any. The callback runs on a callback thread (callbacks.h), once for each generation that
// fails; what it throws is logged there.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "base/mutex.h"
#include "comm/callbacks.h"
#include "comm/lifecycle.h"

namespace torchft_ext {

class FailureListener : public std::enable_shared_from_this<FailureListener> {
 public:
  using Callback = std::function<void(const FailurePtr&)>;

  // Empty: no more.
  void set(Callback callback) {
    MutexLock lock(mutex_);
    callback_ = std::move(callback);
  }

  // Of a generation whose members have met, before anything can fail it unheard.
  void follow(const std::shared_ptr<Lifecycle>& lifecycle) {
    lifecycle->subscribe([self = shared_from_this()](const FailurePtr& failure) {
      if (self->isSet()) runOnCallbackThread([self, failure] { self->call(failure); });
    });
  }

 private:
  bool isSet() {
    MutexLock lock(mutex_);
    return callback_ != nullptr;
  }
  void call(const FailurePtr& failure) {
    Callback callback;
    {
      MutexLock lock(mutex_);
      callback = callback_;
    }
    if (callback) callback(failure);
  }

  Mutex mutex_;
  Callback callback_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
