// Times from Python: datetime.timedelta only, since a bare number leaves its unit open. Rounded up
// to milliseconds, so that no time becomes zero, which means something else.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/deadline.h"

namespace torchft_ext {

// More than a century, so "never" (base/deadline.h), and what a timedelta can hold when it is read
// back.
inline constexpr std::chrono::milliseconds kNeverInPython =
    kCentury + std::chrono::milliseconds(std::chrono::hours(24));

// Not by pybind11's conversion, which overflows: a timedelta may be three million years long.
inline std::chrono::milliseconds ceilOfTimedelta(const pybind11::handle& value) {
  const std::chrono::hours days(24 * value.attr("days").cast<int64_t>());
  const std::chrono::seconds seconds(value.attr("seconds").cast<int64_t>());
  const std::chrono::microseconds rest(value.attr("microseconds").cast<int64_t>());
  return std::chrono::milliseconds(days) + seconds +
         std::chrono::ceil<std::chrono::milliseconds>(rest);
}

// TypeError naming the argument unless it is a timedelta.
inline std::chrono::milliseconds limitOf(const char* argument, const pybind11::handle& value) {
  const pybind11::object type = pybind11::module_::import("datetime").attr("timedelta");
  if (!pybind11::isinstance(value, type)) {
    throw pybind11::type_error(std::string(argument) + ": expected a datetime.timedelta, found " +
                               Py_TYPE(value.ptr())->tp_name);
  }
  return std::min(ceilOfTimedelta(value), kNeverInPython);
}

inline std::optional<std::chrono::milliseconds> optionalLimitOf(const char* argument,
                                                                const pybind11::handle& value) {
  return value.is_none() ? std::nullopt : std::optional(limitOf(argument, value));
}

}  // namespace torchft_ext
