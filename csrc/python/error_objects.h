// Failures as instances of the classes in torchft_ext/errors.py.
#pragma once

#include <pybind11/pybind11.h>

#include "torchft_ext/failure.h"

namespace torchft_ext {

// With the GIL. None for no failure.
pybind11::object errorObject(const FailurePtr& failure);
const char* nameOf(FailureKind kind);  // "peer_lost", ...: keys of stats() and of the classes

}  // namespace torchft_ext
