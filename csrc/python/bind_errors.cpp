// The two hooks that Python installs in the core: what a failure is thrown as, and what waits call
// now and then.
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>

#include "base/log.h"
#include "base/raise.h"
#include "c10d/work/comm_error.h"
#include "comm/op_state.h"
#include "python/bindings.h"
#include "python/error_objects.h"
#include "python/held_error.h"

namespace py = pybind11;

namespace torchft_ext {
namespace {

// A callable of errors.py; leaked, so that it is there whenever a failure is thrown. Under the GIL.
PyObject* error_factory = nullptr;

// Returns, and so leaves the throwing to the core, where Python is gone or the object cannot be
// made. Each raise is of an object of its own: a future holds what is thrown for good, and a raised
// object the frames that it went through, which may hold the future.
void throwAsPython(const FailurePtr& failure) {
  if (!interpreterUsable()) return;
  const py::gil_scoped_acquire gil;
  py::object exception;
  try {
    exception = errorObject(failure);
  } catch (const py::error_already_set& error) {
    log(LogLevel::kError,
        std::string("cannot make the Python error of a failure: ") + error.what());
    return;
  }
  raiseAs<HeldError>(failure, py::type::of(exception), py::make_tuple(exception),
                     failure->describe());
}

bool onMainThread() {
  return ::syscall(SYS_gettid) == ::getpid();
}

// Python runs signal handlers on its main thread only, and only when it is asked to.
void checkSignals() {
  if (!onMainThread() || !interpreterUsable()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw HeldError::fetch();
}

// c10's errors and held ones, for the functions of this module; everything else is pybind11's
// business.
// NOLINTNEXTLINE(performance-unnecessary-value-param): the signature that pybind11 wants
void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (python_error& error) {
    error.restore();
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(pointer);
  }
}

py::object seconds(std::chrono::nanoseconds duration) {
  return py::float_(std::chrono::duration<double>(duration).count());
}

}  // namespace

const char* nameOf(FailureKind kind) {
  switch (kind) {
    case FailureKind::kPeerLost:
      return "peer_lost";
    case FailureKind::kPeerLeft:
      return "peer_left";
    case FailureKind::kConnectionLost:
      return "connection_lost";
    case FailureKind::kTimeout:
      return "timeout";
    case FailureKind::kAborted:
      return "aborted";
    case FailureKind::kStoreLost:
      return "store_lost";
    case FailureKind::kMismatch:
      return "mismatch";
    case FailureKind::kRendezvous:
      return "rendezvous";
    case FailureKind::kInternal:
      break;
  }
  return "internal";
}

py::str textOf(const std::string& text) {
  PyObject* decoded =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

py::object errorObject(const FailurePtr& failure) {
  if (!failure) return py::none();
  if (error_factory == nullptr) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(textOf(failure->describe()));
  }
  using namespace py::literals;  // pybind11's keyword syntax
  const Cause& cause = failure->cause;
  return py::reinterpret_borrow<py::object>(error_factory)(
      nameOf(failure->kind), textOf(failure->describe()), "group"_a = textOf(failure->group),
      "generation"_a = failure->generation, "rank"_a = failure->rank, "size"_a = failure->size,
      "op"_a = failure->op, "seq"_a = failure->seq, "elapsed"_a = seconds(failure->elapsed),
      "limit"_a = seconds(failure->limit), "cause_rank"_a = cause.rank,
      "other_rank"_a = cause.other_rank, "host"_a = textOf(cause.host), "pid"_a = cause.pid,
      "how"_a = textOf(cause.how));
}

void bind_errors(py::module_& module) {
  py::register_local_exception_translator(&translate);
  module.def(
      "_install_error_factory",
      [](const py::object& factory) {
        error_factory = py::object(factory).release().ptr();
        setThrower(&throwAsPython);
        setWaitHook(&checkSignals);
      },
      py::arg("factory"));
  module.def(
      "_warn", [](const std::string& line) { log(LogLevel::kWarning, line); }, py::arg("line"));
  module.def(
      "_info", [](const std::string& line) { log(LogLevel::kInfo, line); }, py::arg("line"));
}

}  // namespace torchft_ext
