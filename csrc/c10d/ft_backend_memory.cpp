// Memory pools that are registered with NCCL: torch's register_mem_pool() and
// deregister_mem_pool().
//
// ValueError for a pool that is not registered or names no device; NotImplementedError on a group
// without NCCL; RuntimeError for a group that was shut down; DistBackendError where NCCL refuses,
// with the epoch unharmed; CommTimeoutError where it is not done within the group's timeout.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "c10d/comm_error.h"
#include "c10d/ft_backend.h"

namespace torchft_ext {

void FtBackend::checkPools(const char* operation) const {
  guard_.check("this process group");
  TORCH_CHECK_NOT_IMPLEMENTED(
      memory_, operation, ": this group has no NCCL to register memory with: ", devices_.whyNone());
}

void FtBackend::registerMemPool(MemoryPool pool) {
  checkPools("register_mem_pool");
  const c10::impl::VirtualGuardImpl impl(devices_.platform()->device_type);
  for (const MemorySegment& segment : pool.segments)
    TORCH_CHECK_VALUE(segment.device >= 0 && segment.device < impl.deviceCount(),
                      "register_mem_pool: pool.snapshot(): device: expected an index from 0 to ",
                      impl.deviceCount() - 1, ", found ", static_cast<int>(segment.device));
  const Clock::time_point began = Clock::now();
  const Duration limit = group_->timeout();
  const MemoryOutcome outcome = memory_->add(std::move(pool), Deadline::after(limit));
  throwUnlessDone("register_mem_pool", outcome, began, limit);
}

void FtBackend::deregisterMemPool(const PoolId& id) {
  checkPools("deregister_mem_pool");
  const Clock::time_point began = Clock::now();
  const Duration limit = group_->timeout();
  const Deadline deadline = Deadline::after(limit);
  MemoryOutcome outcome;
  FailurePtr late;
  try {
    // An epoch that has failed already, or none, has nothing under way.
    if (memory_->knows(id) && !errored()) {
      const FailurePtr failure = group_->check(deadline);
      if (failure && failure->op == "check") late = failure;
    }
    outcome = memory_->remove(id, deadline);
  } catch (...) {
    group_->abort("deregister_mem_pool() was interrupted");
    throw;
  }
  throwUnlessDone("deregister_mem_pool", outcome, began, limit);
  if (late) throwFailure(late);
}

void FtBackend::throwUnlessDone(const char* operation, const MemoryOutcome& outcome,
                                Clock::time_point began, Duration limit) const {
  using Kind = MemoryOutcome::Kind;
  if (outcome.kind == Kind::kDone) return;
  TORCH_CHECK(outcome.kind != Kind::kClosed, operation, ": group '", groupName(),
              "' was shut down, and has no memory registered any more");
  TORCH_CHECK_VALUE(outcome.kind != Kind::kUnknown, operation,
                    ": pool: expected one that is registered with group '", groupName(),
                    "', found ", outcome.why);
  TORCH_CHECK_WITH(DistBackendError, outcome.kind != Kind::kRefused, operation, " on '",
                   groupName(), "' (rank ", currentRank(), "/", currentSize(), ", epoch ", epoch(),
                   "): ", outcome.why);
  Failure failure;
  failure.kind = FailureKind::kTimeout;
  failure.op = operation;
  failure.group = groupName();
  failure.epoch = epoch();
  failure.rank = currentRank();
  failure.size = currentSize();
  failure.cause.rank = failure.rank;
  failure.cause.how = outcome.why;
  failure.elapsed = Clock::now() - began;
  failure.limit = limit;
  throwFailure(std::make_shared<const Failure>(std::move(failure)));
}

}  // namespace torchft_ext
