// A Python exception that travels through C++: thrown on any thread, copied into futures, raised
// any number of times.
//
// torch's binding code knows python_error and raises what it holds. Unlike py::error_already_set it
// may be raised more than once. Its references are taken and released under the GIL; when the
// interpreter is going down they are leaked.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <string>
#include <utility>

namespace torchft_ext {

inline bool interpreterUsable() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

class HeldError : public python_error {
 public:
  // The error that is set in Python now. With the GIL.
  static HeldError fetch() {
    HeldError error;
    error.persist();
    return error;
  }

  // With the GIL. made_of: an instance, or a tuple of arguments, of which Python makes one at each
  // raise.
  HeldError(const pybind11::type& kind, const pybind11::object& made_of, std::string text) {
    type = kind.inc_ref().ptr();
    value = made_of.inc_ref().ptr();
    message = std::move(text);
  }
  HeldError(const HeldError&) = default;
  HeldError(HeldError&&) noexcept = default;
  HeldError& operator=(const HeldError&) = delete;
  HeldError& operator=(HeldError&&) = delete;
  ~HeldError() override {
    if (!interpreterUsable()) type = value = traceback = nullptr;
  }

 private:
  HeldError() = default;
};

}  // namespace torchft_ext
