// Failures as instances of the classes in torchft_ext/errors.py.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "torchft_ext/failure.h"

namespace torchft_ext {

// With the GIL. None for no failure.
pybind11::object errorObject(const FailurePtr& failure);
// For messages: what is no UTF-8, as another process may say it, becomes U+FFFD.
pybind11::str textOf(const std::string& text);
const char* nameOf(FailureKind kind);  // "peer_lost", ...: keys of stats() and of the classes

}  // namespace torchft_ext
