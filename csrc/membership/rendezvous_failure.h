// How an attempt's failures begin: kind and cause, without group, generation and operation.
#pragma once

#include <string>

#include "membership/records.h"
#include "membership/store_thread.h"

namespace torchft_ext {

Failure failureOf(FailureKind kind, std::string how);
// Of a call that was not answered.
Failure failureOf(const StoreReply& reply);
std::string nameProcess(const MemberRecord& record);

}  // namespace torchft_ext
