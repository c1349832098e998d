// What torch calls abort hooks (2.14 and later): functions that are called when a generation fails,
// by timeout, loss, error or abort(), so that users can write down what they need for debugging.
//
// Once each for every generation that fails, on the callback thread (comm/callbacks.h), in the
// order of their ids, beside the abort and not before it: nothing that user code does may hold up
// the release of those who wait. They may block, issue, abort. What they throw is logged. Not for a
// configure() that fails, which says so itself, nor for goodbyes.
//
// Owner: the backend, and calls under way. Threads: any. Destruction does nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "base/mutex.h"

namespace torchft_ext {

class AbortHooks : public std::enable_shared_from_this<AbortHooks> {
 public:
  using Hook = std::function<void()>;

  // False: that id is taken.
  bool add(int64_t id, Hook hook);
  // False: there is none. One that runs is not waited for.
  bool remove(int64_t id);
  // Has all of them called, later. Never blocks.
  void call();

 private:
  void run() const;

  mutable Mutex mutex_;
  std::map<int64_t, std::shared_ptr<const Hook>> hooks_
      GUARDED_BY(mutex_);  // copies may need the GIL
};

}  // namespace torchft_ext
