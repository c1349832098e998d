#include "python/group_stats.h"

#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "base/threads.h"
#include "host/process.h"
#include "python/bindings.h"
#include "python/error_objects.h"

namespace py = pybind11;

namespace torchft_ext {
namespace {

template <typename Value>
py::dict byKind(const std::array<Value, kOpKinds>& values) {
  py::dict result;
  for (size_t kind = 0; kind < kOpKinds; ++kind) {
    const char* const name = toString(static_cast<OpKind>(kind));
    if constexpr (std::is_same_v<Value, Duration>)
      result[name] = std::chrono::duration<double>(values[kind]).count();
    else
      result[name] = values[kind];
  }
  return result;
}

// Of every group of the process, also of those that C++ has made. For metrics().
struct GroupNow {
  std::shared_ptr<Group> group;
  GroupStats stats;
};

std::vector<GroupNow> groupsNow() {
  const py::gil_scoped_release no_gil;
  std::vector<GroupNow> all;
  for (auto& group : knownGroups()) {
    GroupStats stats = group->stats();
    all.push_back({std::move(group), std::move(stats)});
  }
  return all;
}

py::dict groupDict(const GroupNow& one) {
  py::dict result;
  result["name"] = textOf(one.group->name());
  result["generation"] = one.group->generation();
  result["rank"] = one.group->rank();
  result["size"] = one.group->size();
  result["failed"] = one.group->errored() != nullptr;
  result["shut_down"] = one.group->isShutDown();
  result["generations"] = one.stats.generations;
  result["failed_configures"] = one.stats.failed_configures;
  result["operations"] = byKind(one.stats.operations_by_kind);
  result["operation_bytes"] = byKind(one.stats.totals.bytes);
  result["operation_seconds"] = byKind(one.stats.totals.time);
  result["bytes_sent"] = one.stats.bytes_sent;
  result["bytes_received"] = one.stats.bytes_received;
  result["failures"] = failuresOf(one.stats);
  result["waited_for"] = waitedForOf(one.stats);
  py::dict phases;
  for (const auto& [phase, duration] : one.stats.last_configure) {
    phases[py::str(phase)] = std::chrono::duration<double>(duration).count();
  }
  result["last_configure_seconds"] = phases;
  if (const auto engine = one.group->engine()) addCounters(*engine, result);
  return result;
}

// Groups end without the GIL, should this be the last to hold one.
py::list groupStats() {
  std::vector<GroupNow> all = groupsNow();
  py::list result;
  for (const GroupNow& one : all) result.append(groupDict(one));
  const py::gil_scoped_release no_gil;
  all.clear();
  return result;
}

// Of the process: threads of the library, those that did not end, and open descriptors.
py::tuple processStats() {
  ThreadSnapshot snapshot;
  int descriptors = 0;
  {
    const py::gil_scoped_release no_gil;
    snapshot = threadSnapshot();
    descriptors = openDescriptors();
  }
  return py::make_tuple(snapshot.running.size(), snapshot.stuck, descriptors);
}

}  // namespace

py::dict failuresOf(const GroupStats& stats) {
  py::dict counts;
  for (int kind = static_cast<int>(FailureKind::kPeerLost);
       kind <= static_cast<int>(FailureKind::kInternal); ++kind) {
    counts[nameOf(static_cast<FailureKind>(kind))] = stats.failures[kind];
  }
  return counts;
}

py::dict waitedForOf(const GroupStats& stats) {
  py::dict seconds;
  for (size_t rank = 0; rank < stats.waited_for.size(); ++rank) {
    const Duration waited = stats.waited_for[rank];
    if (waited > Duration::zero())
      seconds[py::int_(rank)] = std::chrono::duration<double>(waited).count();
  }
  return seconds;
}

void addCounters(const Engine& engine, py::dict& result) {
  const std::string prefix = "monitor_";
  py::dict monitor;
  py::dict counters;
  for (const auto& [name, value] : engine.counters()) {
    if (name.starts_with(prefix)) {
      monitor[py::str(name.substr(prefix.size()))] = value;
    } else {
      counters[py::str(name)] = value;
    }
  }
  result["engine"] = engine.name();
  result["counters"] = counters;
  result["monitor"] = monitor.empty() ? py::object(py::none()) : py::object(monitor);
}

void bind_group_stats(py::module_& module) {
  module.def("_group_stats", &groupStats);
  module.def("_process_stats", &processStats);
}

}  // namespace torchft_ext
