// Text, numbers and switches from Python. Another type is a TypeError that names the argument, what
// was expected and what was found, where pybind11 would list signatures.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

namespace torchft_ext {

[[noreturn]] inline void refuseType(const char* argument, const char* expected,
                                    const pybind11::handle& value) {
  throw pybind11::type_error(std::string(argument) + ": expected " + expected + ", found " +
                             Py_TYPE(value.ptr())->tp_name + " " +
                             pybind11::repr(value).cast<std::string>());
}

inline std::string textOf(const char* argument, const pybind11::handle& value) {
  if (!pybind11::isinstance<pybind11::str>(value)) refuseType(argument, "a str", value);
  return value.cast<std::string>();
}

inline std::optional<std::string> optionalTextOf(const char* argument,
                                                 const pybind11::handle& value) {
  if (value.is_none()) return std::nullopt;
  if (!pybind11::isinstance<pybind11::str>(value)) refuseType(argument, "a str or None", value);
  return value.cast<std::string>();
}

// Whatever is an integer to Python (int, numpy's, ...) and fits; not True, which is a slip.
inline int numberOf(const char* argument, const pybind11::handle& value) {
  const bool is_switch = pybind11::isinstance<pybind11::bool_>(value);
  if (is_switch || PyIndex_Check(value.ptr()) == 0)
    refuseType(argument, "an int (of 32 bits)", value);
  try {
    return value.cast<int>();
  } catch (const pybind11::cast_error&) {
    refuseType(argument, "an int (of 32 bits)", value);
  }
}

// A bool alone: 2 or "no" would count as true, None as false.
inline bool switchOf(const char* argument, const pybind11::handle& value) {
  if (!pybind11::isinstance<pybind11::bool_>(value)) refuseType(argument, "a bool", value);
  return value.cast<bool>();
}

inline std::optional<bool> optionalSwitchOf(const char* argument, const pybind11::handle& value) {
  if (value.is_none()) return std::nullopt;
  if (!pybind11::isinstance<pybind11::bool_>(value)) refuseType(argument, "a bool or None", value);
  return value.cast<bool>();
}

}  // namespace torchft_ext
