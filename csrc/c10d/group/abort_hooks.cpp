#include "c10d/group/abort_hooks.h"

#include <exception>
#include <string>
#include <utility>

#include "base/log.h"
#include "comm/callbacks.h"

namespace torchft_ext {

bool AbortHooks::add(int64_t id, Hook hook) {
  auto shared = std::make_shared<const Hook>(std::move(hook));
  const MutexLock lock(mutex_);
  return hooks_.emplace(id, std::move(shared)).second;
}

bool AbortHooks::remove(int64_t id) {
  std::shared_ptr<const Hook> removed;  // without the lock: its end may need the GIL
  const MutexLock lock(mutex_);
  const auto found = hooks_.find(id);
  if (found == hooks_.end()) return false;
  removed = std::move(found->second);
  hooks_.erase(found);
  return true;
}

void AbortHooks::call() {
  {
    const MutexLock lock(mutex_);
    if (hooks_.empty()) return;
  }
  runOnCallbackThread([self = shared_from_this()] { self->run(); });
}

void AbortHooks::run() const {
  std::map<int64_t, std::shared_ptr<const Hook>> hooks;
  {
    const MutexLock lock(mutex_);
    hooks = hooks_;
  }
  for (const auto& [id, hook] : hooks) {
    const std::string which = "abort hook " + std::to_string(id);
    try {
      (*hook)();
    } catch (const std::exception& error) {
      log(LogLevel::kError, which + " threw: " + error.what());
    } catch (...) {
      log(LogLevel::kError, which + " threw");
    }
  }
}

}  // namespace torchft_ext
