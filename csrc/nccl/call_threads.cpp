#include "nccl/call_threads.h"

#include <string>
#include <system_error>
#include <utility>

#include "base/log.h"

namespace torchft_ext {
namespace {

NcclResult resultOf(const std::function<NcclResult()>& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    log(LogLevel::kError, std::string("a call into NCCL was cut short: ") + error.what());
    return NcclResult::kInternalError;
  }
}

}  // namespace

std::optional<NcclResult> CallThreads::Call::await(Deadline deadline) {
  MutexLock lock(mutex_);
  while (!result_ && !deadline.expired()) changed_.waitUntil(mutex_, deadline);
  return result_;
}

void CallThreads::Call::finish(NcclResult result) {
  MutexLock lock(mutex_);
  result_ = result;
  changed_.notifyAll();
}

CallThreads::~CallThreads() {
  stop(Deadline::at(Clock::now()));
}

std::shared_ptr<CallThreads::Call> CallThreads::start(std::function<NcclResult()> call) {
  if (inherited() || !collect()) return nullptr;
  auto handle = std::make_shared<Call>();
  const auto body = [handle, call = std::move(call)]() mutable {
    const NcclResult result = resultOf(call);
    call = nullptr;  // what it used is let go of before anyone is told
    handle->finish(result);
  };
  try {
    OwnedThread thread("ft-nccl-call", body);
    MutexLock lock(mutex_);
    if (stopped_) {
      thread.abandon("it began while the process's NCCL threads ended");
    } else {
      threads_.push_back(std::move(thread));
    }
  } catch (const std::system_error& error) {
    log(LogLevel::kError, std::string("no thread for a call into NCCL: ") + error.what());
    return nullptr;
  }
  return handle;
}

// Those that have returned are joined, without the lock. False: it is the end.
bool CallThreads::collect() {
  std::vector<OwnedThread> ended;
  bool going = false;
  {
    MutexLock lock(mutex_);
    going = !stopped_;
    std::vector<OwnedThread> running;
    for (OwnedThread& thread : threads_)
      (thread.running() ? running : ended).push_back(std::move(thread));
    threads_.swap(running);
  }
  for (OwnedThread& thread : ended) thread.join(Deadline::never());
  return going;
}

bool CallThreads::stop(Deadline deadline) {
  if (inherited()) return true;
  std::vector<OwnedThread> threads;
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    threads.swap(threads_);
  }
  bool all = true;
  for (OwnedThread& thread : threads) {
    if (thread.join(deadline)) continue;
    thread.abandon("a call into NCCL does not return");
    all = false;
  }
  return all;
}

}  // namespace torchft_ext
