// The user's functions, each under an id of its own.
//
// Owner: the object that calls them. Threads: any. The table holds no lock while it calls or
// destroys a function: either may need the GIL. If a function throws, the table logs the exception
// and calls the others. A function that was removed may still be running. Destruction does nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/mutex.h"

namespace torchft_ext {

template <typename... Arguments>
class HookTable {
 public:
  using Hook = std::function<void(Arguments...)>;

  // what: "abort hook", for the log.
  explicit HookTable(const char* what) : what_(what) {}

  // False: that id is taken.
  bool add(int64_t id, Hook hook) {
    auto shared = std::make_shared<const Hook>(std::move(hook));
    const MutexLock lock(mutex_);
    // try_emplace() leaves `shared` alone where the id is taken: it dies without the lock.
    const bool added = hooks_.try_emplace(id, std::move(shared)).second;
    empty_.store(false, std::memory_order_release);
    return added;
  }

  // False: there is none.
  bool remove(int64_t id) {
    std::shared_ptr<const Hook> removed;
    const MutexLock lock(mutex_);
    const auto found = hooks_.find(id);
    if (found == hooks_.end()) return false;
    removed = std::move(found->second);
    hooks_.erase(found);
    empty_.store(hooks_.empty(), std::memory_order_release);
    return true;
  }

  // Takes no lock: each operation passes here.
  bool empty() const { return empty_.load(std::memory_order_acquire); }

  // Each of them, in the order of ids, on this thread.
  void call(const Arguments&... arguments) const {
    std::map<int64_t, std::shared_ptr<const Hook>> hooks;
    {
      const MutexLock lock(mutex_);
      hooks = hooks_;
    }
    for (const auto& [id, hook] : hooks) {
      const std::string which = std::string(what_) + " " + std::to_string(id);
      try {
        (*hook)(arguments...);
      } catch (const std::exception& error) {
        log(LogLevel::kError, which + " threw: " + error.what());
      } catch (...) {
        log(LogLevel::kError, which + " threw");
      }
    }
  }

 private:
  const char* const what_;
  std::atomic<bool> empty_{true};  // written under mutex_
  mutable Mutex mutex_;
  std::map<int64_t, std::shared_ptr<const Hook>> hooks_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext
