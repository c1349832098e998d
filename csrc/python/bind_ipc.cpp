#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>

#include "c10d/group/engine_ipc.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace torchft_ext {
namespace {

c10::Device deviceAt(const DeviceIpc& ipc, int index) {
  return {ipc.type(), static_cast<c10::DeviceIndex>(index)};
}

// An event of this process's, for its child.
class LentEvent {
 public:
  explicit LentEvent(int device)
      : device_(deviceAt(*ipc_, device)), event_(ipc_->makeEvent(device_.index())) {}

  py::bytes handle() const { return event_->handle(); }
  void record() { event_->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_)); }

 private:
  const std::shared_ptr<DeviceIpc> ipc_ = deviceIpc();
  const c10::Device device_;
  const std::shared_ptr<IpcEvent> event_;
};

std::string deviceType() {
  return c10::DeviceTypeName(deviceIpc()->type(), /*lower_case=*/true);
}

py::tuple memoryAt(uintptr_t address, int device) {
  const auto ipc = deviceIpc();
  // NOLINTNEXTLINE(performance-no-int-to-ptr): a tensor's data_ptr()
  const auto* inside = reinterpret_cast<const void*>(address);
  const IpcMemory memory = [&] {
    const py::gil_scoped_release unlocked;
    return ipc->memoryAt(inside, deviceAt(*ipc, device).index());
  }();
  return py::make_tuple(memory.base, memory.bytes, py::bytes(memory.handle));
}

bool capturing(int device) {
  const auto ipc = deviceIpc();
  return ipc->capturing(c10::impl::VirtualGuardImpl(ipc->type()).getStream(deviceAt(*ipc, device)));
}

}  // namespace

void bind_ipc(py::module_& module) {
  module.def("_ipc_device_type", &deviceType);
  module.def("_ipc_memory", &memoryAt, py::arg("address"), py::arg("device"));
  module.def("_ipc_capturing", &capturing, py::arg("device"));
  using Unlocked = py::call_guard<py::gil_scoped_release>;  // a driver may take its time
  py::class_<LentEvent>(module, "_IpcEvent")
      .def(py::init<int>(), py::arg("device"), Unlocked())
      .def("handle", &LentEvent::handle)
      .def("record", &LentEvent::record, Unlocked());
}

}  // namespace torchft_ext
