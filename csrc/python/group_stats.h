// What groups count, as dictionaries: for Backend.stats(), and of all groups of the process for
// metrics(). With the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include "comm/communicator.h"
#include "comm/group.h"

namespace torchft_ext {

pybind11::dict failuresOf(const GroupStats& stats);  // by name of the kind
// By rank, of those that were waited for; in seconds.
pybind11::dict waitedForOf(const GroupStats& stats);
// The engine's counters; those of the monitor apart, without their prefix, or None where it has
// none.
void addCounters(const Engine& engine, pybind11::dict& result);

}  // namespace torchft_ext
