#include "nccl/nccl_threads.h"

#include "base/fork.h"

namespace torchft_ext {
namespace {

struct Shared {
  Mutex mutex;
  std::shared_ptr<NcclThreads> threads GUARDED_BY(mutex);
  Duration abort_limit GUARDED_BY(mutex) = std::chrono::seconds(10);
};
PerProcess<Shared> shared;

}  // namespace

NcclThreads::NcclThreads(Duration abort_limit)
    : events(std::make_shared<EventPool>()),
      poller(std::make_shared<EventPoller>()),
      calls(std::make_shared<CallThreads>()),
      reaper(
          [weak = std::weak_ptr<EventPoller>(poller)] {
            if (const auto alive = weak.lock()) alive->wake();
          },
          abort_limit) {}

std::shared_ptr<NcclThreads> sharedNcclThreads() {
  MutexLock lock(shared.get().mutex);
  auto& threads = shared.get().threads;
  if (!threads) threads = std::make_shared<NcclThreads>(shared.get().abort_limit);
  return threads;
}

bool stopNcclThreads(Deadline deadline) {
  std::shared_ptr<NcclThreads> threads;
  {
    MutexLock lock(shared.get().mutex);
    threads.swap(shared.get().threads);
  }
  if (!threads) return true;
  const bool reaped = threads->reaper.stop(deadline);
  const bool returned = threads->calls->stop(deadline);  // those that the reaper has freed
  return threads->poller->stop(deadline) && returned && reaped;
}

void setAbortLimitForTest(Duration limit) {
  MutexLock lock(shared.get().mutex);
  shared.get().abort_limit = limit;
}

}  // namespace torchft_ext
