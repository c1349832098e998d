// Times from Python: datetime.timedelta only, since a bare number leaves its unit open.
#pragma once

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <optional>
#include <string>

namespace torchft_ext {

// TypeError naming the argument unless it is a timedelta.
inline std::chrono::milliseconds limitOf(const char* argument, const pybind11::handle& value) {
  const pybind11::object type = pybind11::module_::import("datetime").attr("timedelta");
  if (!pybind11::isinstance(value, type)) {
    throw pybind11::type_error(std::string(argument) + ": expected a datetime.timedelta, found " +
                               Py_TYPE(value.ptr())->tp_name);
  }
  return std::chrono::ceil<std::chrono::milliseconds>(value.cast<std::chrono::microseconds>());
}

inline std::optional<std::chrono::milliseconds> optionalLimitOf(const char* argument,
                                                                const pybind11::handle& value) {
  return value.is_none() ? std::nullopt : std::optional(limitOf(argument, value));
}

}  // namespace torchft_ext
