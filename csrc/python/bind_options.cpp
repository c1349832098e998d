#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "c10d/environment.h"
#include "c10d/options.h"
#include "python/bindings.h"
#include "python/limits.h"
#include "python/plain_values.h"

namespace py = pybind11;

namespace torchft_ext {
namespace {

using Milliseconds = std::chrono::milliseconds;

c10::intrusive_ptr<FtOptions> makeOptions(const py::object& timeout_limit,
                                          const py::object& interface_name, const py::object& ports,
                                          const py::object& local_sockets,
                                          const py::object& heartbeat_limit,
                                          const py::object& nan_check, const py::object& poison,
                                          const py::object& high_priority_stream,
                                          const py::object& blocking_wait) {
  const std::optional<Milliseconds> timeout = optionalLimitOf("Options: timeout", timeout_limit);
  const std::optional<Milliseconds> heartbeat =
      optionalLimitOf("Options: heartbeat", heartbeat_limit);
  std::optional<std::string> interface = optionalTextOf("Options: interface", interface_name);
  std::optional<std::string> port_range = optionalTextOf("Options: port_range", ports);
  TORCH_CHECK_VALUE(!timeout || timeout->count() > 0,
                    "Options: timeout: expected a positive time, found ",
                    timeout.value_or(Milliseconds(0)).count(), " ms");
  if (heartbeat) checkHeartbeat("Options: heartbeat", *heartbeat);
  TORCH_CHECK_VALUE(!interface || !interface->empty(),
                    "Options: interface: expected a name, found ''");
  if (port_range) parsePortRange("Options: port_range", *port_range);
  auto options = c10::make_intrusive<FtOptions>(timeout);
  options->interface = std::move(interface);
  options->port_range = std::move(port_range);
  options->local_sockets = optionalSwitchOf("Options: local_sockets", local_sockets);
  options->heartbeat = heartbeat;
  options->nan_check = optionalSwitchOf("Options: nan_check", nan_check);
  options->poison = switchOf("Options: poison", poison);
  options->high_priority_stream = switchOf("Options: high_priority_stream", high_priority_stream);
  options->blocking_wait = switchOf("Options: blocking_wait", blocking_wait);
  return options;
}

std::optional<Milliseconds> chosenTimeout(const FtOptions& options) {
  return options.timeout_chosen ? std::optional<Milliseconds>(options.timeout) : std::nullopt;
}

c10::intrusive_ptr<FtOptions> copyOf(const FtOptions& options) {
  return c10::make_intrusive<FtOptions>(options);
}

// What help(Options) shows; docs/contract.md has the same as a table.
constexpr const char* kOptionsText = R"(
What one group may choose: each is explained below.

None leaves it to the environment variable named there, then to the default. A bad value of a
variable is a ValueError where a group is made.)";
constexpr const char* kInitText = R"(
Check the values, all given by keyword; nothing is opened or sent.

Raises:
    ValueError: a time that is not positive, a heartbeat out of its bounds, an empty interface,
        no port range, or one of fewer than three ports.
    TypeError: a value of another type than said at the option.)";
constexpr const char* kTimeoutText = R"(
timedelta or None: the limit of operations and of configure(), above zero.

Rounded up to milliseconds; over a century means never. Backend.set_timeout() changes it later.
Default: that of init_process_group() or new_group().)";
constexpr const char* kInterfaceText = R"(
str or None: the network interface to listen on.

"eth0"; "eth" (prefix); "eth0,ib0" (the first that is there); "=eth0" (exactly); "^docker,lo" (all
but these). Where there is none, making the group is a ValueError.
Environment: TORCHFT_EXT_SOCKET_IFNAME, then GLOO_SOCKET_IFNAME.
Default: the address by which the store is reached, else that of this host's name, else loopback.)";
constexpr const char* kPortRangeText = R"(
str or None: the TCP ports to listen on, first and last: "7000-7100"; "0": any.

A process takes three, so fewer are refused. Where all are taken, making the group is a
RendezvousError.
Environment: TORCHFT_EXT_PORT_RANGE.
Default: any free port.)";
constexpr const char* kLocalSocketsText = R"(
bool or None: Unix sockets between processes of one host and user, cheaper than TCP.

False: all links of this process are TCP.
Environment: TORCHFT_EXT_LOCAL_SOCKETS, 0 or 1.
Default: True.)";
constexpr const char* kHeartbeatText = R"(
timedelta or None: the silence after which a peer counts as frozen, which is a PeerLostError.

Zero: off; else 100 ms to 24 hours, rounded up to milliseconds.
Environment: TORCHFT_EXT_HEARTBEAT, in seconds.
Default: 5 s.)";
constexpr const char* kNanCheckText = R"(
bool or None: a NaN in this rank's input of an operation fails the epoch.

That is a CommAbortedError on all ranks, and names this one.
Environment: TORCHFT_EXT_NAN_CHECK, 0 or 1.
Default: False.)";
constexpr const char* kPoisonText = R"(
bool: outputs of failed device operations become NaN (integers: -1 or the largest value).

Default: False.)";
constexpr const char* kHighPriorityText = R"(
bool: device operations run on streams of high priority.

Default: False.)";
constexpr const char* kBlockingWaitText = R"(
bool: wait() of device operations blocks the host too, and raises what became of them.

Default: False.)";

}  // namespace

void bind_options(py::module_& module) {
  py::class_<FtOptions, c10d::Backend::Options, c10::intrusive_ptr<FtOptions>>(module, "Options",
                                                                               kOptionsText)
      .def(py::init(&makeOptions), py::kw_only(), py::arg("timeout") = py::none(),
           py::arg("interface") = py::none(), py::arg("port_range") = py::none(),
           py::arg("local_sockets") = py::none(), py::arg("heartbeat") = py::none(),
           py::arg("nan_check") = py::none(), py::arg("poison") = false,
           py::arg("high_priority_stream") = false, py::arg("blocking_wait") = false, kInitText)
      // For Backend.options, of which torch makes copies.
      .def("__copy__", &copyOf)
      .def(
          "__deepcopy__",
          [](const FtOptions& options, const py::dict& /*memo*/) { return copyOf(options); },
          py::arg("memo"))
      .def_property_readonly("timeout", &chosenTimeout, kTimeoutText)
      .def_readonly("interface", &FtOptions::interface, kInterfaceText)
      .def_readonly("port_range", &FtOptions::port_range, kPortRangeText)
      .def_readonly("local_sockets", &FtOptions::local_sockets, kLocalSocketsText)
      .def_readonly("heartbeat", &FtOptions::heartbeat, kHeartbeatText)
      .def_readonly("nan_check", &FtOptions::nan_check, kNanCheckText)
      .def_readonly("poison", &FtOptions::poison, kPoisonText)
      .def_readonly("high_priority_stream", &FtOptions::high_priority_stream, kHighPriorityText)
      .def_readonly("blocking_wait", &FtOptions::blocking_wait, kBlockingWaitText);
}

}  // namespace torchft_ext
