// Where a failure, which is a value everywhere below, becomes an exception.
//
// C++ callers get the kinds of torchft_ext/error.h, which are c10::DistBackendErrors too. Where
// Python is loaded, python/ installs a thrower whose exceptions become the Python classes
// PeerLostError and so on as well: torch's binding code would turn any C++ exception into plain
// DistBackendError. Any thread.
#pragma once

#include <exception>
#include <string>

#include "base/deadline.h"
#include "torchft_ext/error.h"

namespace torchft_ext {

class Group;

// Must throw. May be called on any thread, with or without the GIL.
using Thrower = void (*)(const FailurePtr&);
void setThrower(Thrower thrower);  // nullptr: c10::DistBackendErrors

[[noreturn]] void throwFailure(const FailurePtr& failure);
std::exception_ptr exceptionPtr(const FailurePtr& failure);

// That a call on the group, which is no operation of its generation, ran out of time. how: what it
// waited for.
FailurePtr timeoutOf(const Group& group, const char* op, std::string how, Clock::time_point began,
                     Duration limit);

}  // namespace torchft_ext
