#include "c10d/work/comm_error.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <utility>

#include "base/raise.h"
#include "comm/group.h"

namespace torchft_ext {
namespace {

std::atomic<Thrower> installed{nullptr};  // written by setThrower() alone

}  // namespace

void setThrower(Thrower thrower) {
  installed.store(thrower, std::memory_order_release);
}

void throwFailure(const FailurePtr& failure) {
  if (const Thrower thrower = installed.load(std::memory_order_acquire)) thrower(failure);
  raiseAs<c10::DistBackendError>(failure, c10::SourceLocation{__func__, __FILE__, __LINE__},
                                 failure->describe());
}

std::exception_ptr exceptionPtr(const FailurePtr& failure) {
  try {
    throwFailure(failure);
  } catch (...) {
    return std::current_exception();
  }
}

FailurePtr timeoutOf(const Group& group, const char* op, std::string how, Clock::time_point began,
                     Duration limit) {
  Failure failure;
  failure.kind = FailureKind::kTimeout;
  failure.op = op;
  failure.group = group.name();
  failure.generation = group.generation();
  failure.rank = group.rank();
  failure.size = group.size();
  failure.cause.rank = failure.rank;
  failure.cause.how = std::move(how);
  failure.elapsed = Clock::now() - began;
  failure.limit = limit;
  return std::make_shared<const Failure>(std::move(failure));
}

}  // namespace torchft_ext
