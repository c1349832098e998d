#include "c10d/comm_error.h"

#include <atomic>
#include <utility>

namespace torchft_ext {
namespace {

std::atomic<Thrower> installed{nullptr};  // written by setThrower() alone

}  // namespace

CommErrorCxx::CommErrorCxx(FailurePtr failure)
    : c10::DistBackendError(c10::SourceLocation{__func__, __FILE__, __LINE__}, failure->describe()),
      failure_(std::move(failure)) {}

void setThrower(Thrower thrower) {
  installed.store(thrower, std::memory_order_release);
}

void throwFailure(const FailurePtr& failure) {
  if (const Thrower thrower = installed.load(std::memory_order_acquire)) thrower(failure);
  throw CommErrorCxx(failure);
}

std::exception_ptr exceptionPtr(const FailurePtr& failure) {
  try {
    throwFailure(failure);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace torchft_ext
