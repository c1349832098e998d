#include "comm/callbacks.h"

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "base/fork.h"
#include "base/log.h"
#include "comm/callback_path.h"

namespace torchft_ext {
namespace {

PerProcess<CallbackPool> callback_pool;

// Some threads' worth of one callback each is a fault of the program's: its generation ends.
CallbackPool::Starved failing(const std::shared_ptr<Lifecycle>& whose) {
  if (!whose) return nullptr;
  return [whose](const std::string& why) {
    whose->fail(whose->ownFailure(FailureKind::kAborted, why));
  };
}

}  // namespace

bool runOnCallbackThread(std::function<void()> callback, const std::shared_ptr<Lifecycle>& whose) {
  try {
    // What it issues is in no thread's order, and has no name unless it says so (CallbackScope).
    auto in_scope = [callback = std::move(callback)] {
      const CallbackScope without_a_name{std::nullopt};
      callback();
    };
    return callback_pool.get().post(std::move(in_scope), failing(whose));
  } catch (const std::exception& error) {
    log(LogLevel::kError,
        std::string("a callback of a finished operation was dropped: ") + error.what());
    return false;
  }
}

bool onCallbackThread() {
  return CallbackPool::onThread();
}

Duration presentCallbackRunsFor() {
  return callback_pool.get().presentRunsFor();
}

CallbackPool::Counts callbackThreads() {
  return callback_pool.get().counts();
}

bool stopCallbackThreads(Deadline deadline) {
  return callback_pool.get().stop(deadline);
}

}  // namespace torchft_ext
