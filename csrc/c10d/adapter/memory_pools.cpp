#include "c10d/adapter/memory_pools.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "c10d/work/comm_error.h"

namespace torchft_ext {

void MemoryPools::checkServed(const char* operation) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      devices_.platform(), operation,
      ": this group has no device engine to register memory with: ", devices_.whyNone());
  TORCH_CHECK_NOT_IMPLEMENTED(registry_, operation,
                              ": expected a group whose engine registers memory, found ",
                              devices_.platform()->library());
}

void MemoryPools::add(MemoryPool pool) {
  checkServed("register_mem_pool");
  const c10::impl::VirtualGuardImpl impl(devices_.platform()->type());
  for (const MemorySegment& segment : pool.segments)
    TORCH_CHECK_VALUE(segment.device >= 0 && segment.device < impl.deviceCount(),
                      "register_mem_pool: pool.snapshot(): device: expected an index from 0 to ",
                      impl.deviceCount() - 1, ", found ", static_cast<int>(segment.device));
  const Clock::time_point began = Clock::now();
  const Duration limit = group_->timeout();
  const MemoryOutcome outcome = registry_->add(std::move(pool), Deadline::after(limit));
  throwUnlessDone("register_mem_pool", outcome, began, limit);
}

void MemoryPools::remove(const PoolId& id) {
  checkServed("deregister_mem_pool");
  const Clock::time_point began = Clock::now();
  const Duration limit = group_->timeout();
  const Deadline deadline = Deadline::after(limit);
  MemoryOutcome outcome;
  FailurePtr late;
  try {
    // A generation that has failed already, or none, has nothing under way.
    if (registry_->knows(id) && !group_->errored()) {
      const FailurePtr failure = group_->check(deadline);
      if (failure && failure->op == "check") late = failure;
    }
    outcome = registry_->remove(id, deadline);
  } catch (...) {
    group_->abort("deregister_mem_pool() was interrupted");
    throw;
  }
  throwUnlessDone("deregister_mem_pool", outcome, began, limit);
  if (late) throwFailure(late);
}

void MemoryPools::throwUnlessDone(const char* operation, const MemoryOutcome& outcome,
                                  Clock::time_point began, Duration limit) const {
  using Kind = MemoryOutcome::Kind;
  if (outcome.kind == Kind::kDone) return;
  TORCH_CHECK(outcome.kind != Kind::kClosed, operation, ": group '", group_->name(),
              "' was shut down, and has no memory registered any more");
  TORCH_CHECK_VALUE(outcome.kind != Kind::kUnknown, operation,
                    ": pool: expected one that is registered with group '", group_->name(),
                    "', found ", outcome.why);
  TORCH_CHECK_WITH(DistBackendError, outcome.kind != Kind::kRefused, operation, " on '",
                   group_->name(), "' (rank ", group_->rank(), "/", group_->size(), ", generation ",
                   group_->generation(), "): ", outcome.why);
  throwFailure(timeoutOf(*group_, operation, outcome.why, began, limit));
}

void MemoryPools::close() {
  if (registry_) registry_->close();
}

}  // namespace torchft_ext
