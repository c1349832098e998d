#include <pybind11/chrono.h>

#include "c10d/group/log_sink.h"
#include "c10d/work/comm_error.h"
#include "comm/dump_files.h"
#include "comm/op_state.h"
#include "host/process.h"
#include "python/bindings.h"
#include "python/interrupts.h"

namespace py = pybind11;

namespace torchft_ext {
namespace {

// After it nothing of the library calls into Python any more.
bool exitProcess(std::chrono::milliseconds within) {
  setWaitHook(nullptr);  // leaving is bounded, and no signal keeps a group from it
  const Deadline deadline = Deadline::after(within);
  const bool signals_ended = stopInterruptWatch(deadline);
  const bool ended = processExit(deadline) && signals_ended;
  setThrower(nullptr);
  return ended;
}

}  // namespace

void bind_process(py::module_& module) {
  logThroughTorch();
  module.def("_interrupt_pipe", &interruptPipe);
  module.def("_dump", &dumpEverything, py::arg("path"), py::call_guard<py::gil_scoped_release>());
  module.def("_process_exit", &exitProcess, py::arg("within"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchft_ext
