#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "c10d/ddp/ddp_reducer.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace torchft_ext {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

void registerHook(DdpReducer& reducer, py::object state, py::object hook) {
  reducer.registerHook(std::make_unique<c10d::PythonCommHook>(std::move(state), std::move(hook)));
}

std::shared_ptr<torch::jit::PythonFutureWrapper> runHook(DdpReducer& reducer,
                                                         c10d::GradBucket& bucket) {
  return std::make_shared<torch::jit::PythonFutureWrapper>(reducer.runHook(bucket));
}

}  // namespace

void bind_ddp(py::module_& module) {
  py::class_<DdpReducer, std::shared_ptr<DdpReducer>>(module, "_DdpReducer")
      .def(
          py::init<c10::intrusive_ptr<FtBackend>, const std::shared_ptr<c10d::Reducer>&, int64_t>(),
          py::arg("backend"), py::arg("reducer"), py::arg("generation"))
      .def("generation", &DdpReducer::generation)
      .def("why_stale", &DdpReducer::whyStale)
      .def("read_layout", &DdpReducer::readLayout, NoGil())
      .def("renew_views", &DdpReducer::renewViews, NoGil())
      .def("compare_layouts", &DdpReducer::compareLayouts, NoGil())
      .def("register_hook", &registerHook, py::arg("state"), py::arg("hook"))
      .def("register_builtin_hook", &DdpReducer::registerBuiltinHook, py::arg("kind"))
      .def("run_hook", &runHook, py::arg("bucket"), NoGil())
      .def("carry_over", &DdpReducer::carryOver, py::arg("before"), py::arg("used"), NoGil())
      .def("retire", &DdpReducer::retire, NoGil());
}

}  // namespace torchft_ext
