#include "c10d/group/name_lookup.h"

#include <exception>
#include <memory>
#include <utility>

#include "base/mutex.h"
#include "base/threads.h"
#include "c10d/work/comm_error.h"
#include "comm/op_state.h"

namespace torchft_ext {
namespace {

struct PendingAddress {
  Mutex mutex;
  CondVar changed;
  bool given GUARDED_BY(mutex) = false;
  std::optional<SocketAddress> address GUARDED_BY(mutex);
  std::exception_ptr thrown GUARDED_BY(mutex);

  void give(const std::optional<SocketAddress>& found, std::exception_ptr error = nullptr) {
    MutexLock lock(mutex);
    address = found;
    thrown = std::move(error);
    given = true;
    changed.notifyAll();
  }
  bool await(Deadline deadline) {
    MutexLock lock(mutex);
    while (!given && !deadline.expired()) changed.waitUntil(mutex, deadline);
    return given;
  }
  std::optional<SocketAddress> take() {
    MutexLock lock(mutex);
    if (thrown) std::rethrow_exception(thrown);
    return address;
  }
};

[[noreturn]] void throwUnanswered(const std::string& subject, Duration limit) {
  Failure failure;
  failure.kind = FailureKind::kRendezvous;
  failure.cause.how =
      "the look-up of " + subject + " was not answered within " + formatSeconds(limit) +
      "; name an interface with Options(interface=...) or TORCHFT_EXT_SOCKET_IFNAME";
  failure.limit = limit;
  failure.needs_new_group = true;  // this one has not been made
  throwFailure(std::make_shared<const Failure>(std::move(failure)));
}

}  // namespace

std::optional<SocketAddress> lookUp(const std::string& subject, Duration limit,
                                    std::function<std::optional<SocketAddress>()> look) {
  const auto answer = std::make_shared<PendingAddress>();
  OwnedThread thread("ft-resolver", [answer, look = std::move(look)] {
    try {
      answer->give(look());
    } catch (...) {
      answer->give(std::nullopt, std::current_exception());
    }
  });
  const Deadline deadline = Deadline::after(limit);
  while (!answer->await(deadline.orEarlier(kHookInterval))) {
    if (deadline.expired()) {
      thread.abandon("the resolver has not answered about " + subject);
      throwUnanswered(subject, limit);
    }
    runWaitHook();
  }
  thread.join(Deadline::never());  // it has given its answer, and does nothing more
  return answer->take();
}

}  // namespace torchft_ext
