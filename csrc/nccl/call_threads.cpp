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
  auto handle = std::make_shared<Call>();
  MutexLock lock(mutex_);
  if (stopped_) return nullptr;
  std::erase_if(threads_,
                [](OwnedThread& thread) { return thread.join(Deadline::at(Clock::now())); });
  try {
    threads_.emplace_back("ft-nccl-call", [handle, call = std::move(call)]() mutable {
      const NcclResult result = resultOf(call);
      call = nullptr;  // what it used is let go of before anyone is told
      handle->finish(result);
    });
  } catch (const std::system_error& error) {
    log(LogLevel::kError, std::string("no thread for a call into NCCL: ") + error.what());
    return nullptr;
  }
  return handle;
}

bool CallThreads::stop(Deadline deadline) {
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
