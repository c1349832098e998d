#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <utility>

#include "c10d/group/environment.h"
#include "c10d/group/host_options.h"
#include "c10d/group/options.h"
#include "host/shared_environment.h"
#include "python/bindings.h"
#include "python/docstrings.h"
#include "python/limits.h"
#include "python/plain_values.h"

namespace py = pybind11;

namespace torchft_ext {
namespace {

using Milliseconds = std::chrono::milliseconds;

c10::intrusive_ptr<FtOptions> makeOptions(
    const py::object& timeout_limit, const py::object& interface_name, const py::object& ports,
    const py::object& local_sockets, const py::object& heartbeat_limit,
    const py::object& ask_after_time, const py::object& nan_check, const py::object& poison,
    const py::object& high_priority_stream, const py::object& blocking_wait,
    const py::object& staged) {
  const std::optional<Milliseconds> timeout = optionalLimitOf("Options: timeout", timeout_limit);
  const std::optional<Milliseconds> heartbeat =
      optionalLimitOf("Options: heartbeat", heartbeat_limit);
  const std::optional<Milliseconds> ask_after =
      optionalLimitOf("Options: ask_after", ask_after_time);
  std::optional<std::string> interface = optionalTextOf("Options: interface", interface_name);
  std::optional<std::string> port_range = optionalTextOf("Options: port_range", ports);
  TORCH_CHECK_VALUE(!timeout || timeout->count() > 0,
                    "Options: timeout: expected a positive time, found ",
                    timeout.value_or(Milliseconds(0)).count(), " ms");
  if (heartbeat) checkHeartbeat("Options: heartbeat", *heartbeat);
  if (ask_after) checkAskAfter("Options: ask_after", *ask_after);
  TORCH_CHECK_VALUE(!interface || !interface->empty(),
                    "Options: interface: expected a name, found ''");
  if (port_range) parsePortRange("Options: port_range", *port_range);
  auto options = c10::make_intrusive<FtOptions>(timeout);
  options->interface = std::move(interface);
  options->port_range = std::move(port_range);
  options->local_sockets = optionalSwitchOf("Options: local_sockets", local_sockets);
  options->heartbeat = heartbeat;
  options->ask_after = ask_after;
  options->nan_check = optionalSwitchOf("Options: nan_check", nan_check);
  options->poison = switchOf("Options: poison", poison);
  options->high_priority_stream = switchOf("Options: high_priority_stream", high_priority_stream);
  options->blocking_wait = switchOf("Options: blocking_wait", blocking_wait);
  options->staged = optionalSwitchOf("Options: staged", staged);
  return options;
}

std::optional<Milliseconds> chosenTimeout(const FtOptions& options) {
  return options.timeout_chosen ? std::optional<Milliseconds>(options.timeout) : std::nullopt;
}

c10::intrusive_ptr<FtOptions> copyOf(const FtOptions& options) {
  return c10::make_intrusive<FtOptions>(options);
}

c10::intrusive_ptr<FtOptions> networkOptions(const FtOptions& options,
                                             const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<FtOptions>(networkOptionsOf(options, store));
}

// What this process's groups would use now: the table as text, and its digest.
std::pair<std::string, uint32_t> sharedPlans() {
  HostEngineOptions options;
  const std::string problem = useSharedEnvironment(&options);
  TORCH_CHECK_VALUE(problem.empty(), problem);
  return {options.plans.text(), options.plans.digest()};
}

}  // namespace

void bind_options(py::module_& module) {
  py::class_<FtOptions, c10d::Backend::Options, c10::intrusive_ptr<FtOptions>>(module, "Options",
                                                                               docs::Options::about)
      .def(py::init(&makeOptions), py::kw_only(), py::arg("timeout") = py::none(),
           py::arg("interface") = py::none(), py::arg("port_range") = py::none(),
           py::arg("local_sockets") = py::none(), py::arg("heartbeat") = py::none(),
           py::arg("ask_after") = py::none(), py::arg("nan_check") = py::none(),
           py::arg("poison") = false, py::arg("high_priority_stream") = false,
           py::arg("blocking_wait") = false, py::arg("staged") = py::none(), docs::Options::init)
      // For Backend.options, of which torch makes copies.
      .def("__copy__", &copyOf)
      .def(
          "__deepcopy__",
          [](const FtOptions& options, const py::dict& /*memo*/) { return copyOf(options); },
          py::arg("memo"))
      .def_property_readonly("timeout", &chosenTimeout, docs::Options::timeout)
      .def_readonly("interface", &FtOptions::interface, docs::Options::interface)
      .def_readonly("port_range", &FtOptions::port_range, docs::Options::port_range)
      .def_readonly("local_sockets", &FtOptions::local_sockets, docs::Options::local_sockets)
      .def_readonly("heartbeat", &FtOptions::heartbeat, docs::Options::heartbeat)
      .def_readonly("ask_after", &FtOptions::ask_after, docs::Options::ask_after)
      .def_readonly("nan_check", &FtOptions::nan_check, docs::Options::nan_check)
      .def_readonly("poison", &FtOptions::poison, docs::Options::poison)
      .def_readonly("high_priority_stream", &FtOptions::high_priority_stream,
                    docs::Options::high_priority_stream)
      .def_readonly("blocking_wait", &FtOptions::blocking_wait, docs::Options::blocking_wait)
      .def_readonly("staged", &FtOptions::staged, docs::Options::staged);
  module.def("_network_options", &networkOptions, py::arg("options"), py::arg("store"),
             py::call_guard<py::gil_scoped_release>());
  module.def("_shared_plans", &sharedPlans, py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchft_ext
