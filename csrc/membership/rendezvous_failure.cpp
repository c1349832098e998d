#include "membership/rendezvous_failure.h"

#include <utility>

namespace torchft_ext {

Failure failureOf(FailureKind kind, std::string how) {
  Failure failure;
  failure.kind = kind;
  failure.cause.how = std::move(how);
  return failure;
}

Failure failureOf(const StoreReply& reply) {
  switch (reply.status) {
    case StoreStatus::kCancelled:
      return failureOf(FailureKind::kAborted, "the attempt was cancelled");
    case StoreStatus::kTimedOut:
      return failureOf(FailureKind::kTimeout, reply.error);
    case StoreStatus::kLost:
      return failureOf(FailureKind::kStoreLost, reply.error);
    case StoreStatus::kStarved:
      return failureOf(FailureKind::kRendezvous, reply.error);
    case StoreStatus::kOk:
      break;
  }
  return failureOf(FailureKind::kInternal, "a store call failed without a reason");
}

std::string nameProcess(const MemberRecord& record) {
  return "host " + record.host + ", pid " + std::to_string(record.pid);
}

}  // namespace torchft_ext
