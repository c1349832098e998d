#include "python/mem_pools.h"

#include <limits>
#include <optional>
#include <string>

#include "python/held_error.h"
#include "python/plain_values.h"

namespace py = pybind11;

namespace torchft_ext {
namespace {

// Of 64 bits, as addresses are; True is a slip.
uint64_t unsignedOf(const std::string& what, const py::handle& value) {
  constexpr const char* kExpected = "an int from 0 to 2**64 - 1";
  const bool is_switch = py::isinstance<py::bool_>(value);
  if (is_switch || PyIndex_Check(value.ptr()) == 0) refuseType(what.c_str(), kExpected, value);
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!number) throw py::error_already_set();
  const uint64_t found = PyLong_AsUnsignedLongLong(number.ptr());
  if (PyErr_Occurred() == nullptr) return found;
  PyErr_Clear();
  throw py::value_error(what + ": expected " + kExpected + ", found " +
                        py::repr(value).cast<std::string>());
}

py::object attributeOf(const char* operation, const py::object& pool, const char* name) {
  if (!py::hasattr(pool, name))
    refuseType((std::string(operation) + ": pool").c_str(),
               "a torch.cuda.MemPool, or an object with its id and snapshot()", pool);
  return pool.attr(name);
}

// torch 2.11 and later take the keyword; without traces it is far cheaper.
py::object snapshotOf(const py::object& snapshot) {
  try {
    return snapshot(py::arg("include_traces") = false);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return snapshot();
}

PoolId idFrom(const std::string& what, const py::handle& value) {
  if (!py::isinstance<py::tuple>(value) || py::len(value) != 2)
    refuseType(what.c_str(), "a tuple of two ints", value);
  const auto pair = py::reinterpret_borrow<py::tuple>(value);
  return {unsignedOf(what, pair[0]), unsignedOf(what, pair[1])};
}

// nullopt: it is another pool's.
std::optional<MemorySegment> segmentOf(const std::string& what, const py::handle& value,
                                       const PoolId& id) {
  if (!py::isinstance<py::dict>(value)) refuseType(what.c_str(), "a dict", value);
  const auto fields = py::reinterpret_borrow<py::dict>(value);
  const auto field = [&](const char* name) -> py::object {
    if (!fields.contains(name))
      throw py::value_error(what + ": expected a segment with '" + name + "', found " +
                            py::repr(fields).cast<std::string>());
    return fields[name];
  };
  const std::string own = "segment_pool_id";
  if (fields.contains(own) && idFrom(what + "['" + own + "']", fields[own.c_str()]) != id)
    return std::nullopt;
  MemorySegment segment;
  segment.pool = id;
  segment.address = unsignedOf(what + "['address']", field("address"));
  segment.bytes = unsignedOf(what + "['total_size']", field("total_size"));
  const uint64_t device = unsignedOf(what + "['device']", field("device"));
  const auto refuse = [&](const char* expected, uint64_t found) {
    throw py::value_error(what + ": expected " + expected + ", found " + std::to_string(found));
  };
  if (segment.address == 0) refuse("an address above 0", segment.address);
  if (segment.bytes == 0) refuse("a total_size above 0", segment.bytes);
  if (device > static_cast<uint64_t>(std::numeric_limits<c10::DeviceIndex>::max()))
    refuse("the index of a device", device);
  segment.device = static_cast<c10::DeviceIndex>(device);
  return segment;
}

// Whoever lets it go last may be any thread. Once the interpreter goes down it is left alone.
std::shared_ptr<void> keptAlive(py::object object) {
  return {object.release().ptr(), [](PyObject* kept) {
            if (!interpreterUsable()) return;
            const py::gil_scoped_acquire gil;
            Py_DECREF(kept);
          }};
}

}  // namespace

PoolId poolIdOf(const char* operation, const py::object& pool) {
  const std::string what = std::string(operation) + ": pool.id";
  const PoolId id = idFrom(what, attributeOf(operation, pool, "id"));
  if (id == PoolId{}) throw py::value_error(what + ": expected that of a pool, found (0, 0)");
  return id;
}

MemoryPool poolOf(const char* operation, const py::object& pool) {
  MemoryPool found;
  found.id = poolIdOf(operation, pool);
  const std::string what = std::string(operation) + ": pool.snapshot()";
  const py::object segments = snapshotOf(attributeOf(operation, pool, "snapshot"));
  if (!py::isinstance<py::list>(segments) && !py::isinstance<py::tuple>(segments))
    refuseType(what.c_str(), "a list of segments", segments);
  size_t index = 0;
  for (const py::handle& one : py::reinterpret_borrow<py::sequence>(segments)) {
    const auto segment = segmentOf(what + "[" + std::to_string(index++) + "]", one, found.id);
    if (segment) found.segments.push_back(*segment);
  }
  found.owner = keptAlive(pool);
  return found;
}

}  // namespace torchft_ext
