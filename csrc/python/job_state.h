// What is known of an elastic job, as a dictionary: StateFields of torchft_ext/elastic/_native.py.
#pragma once

#include <pybind11/pybind11.h>

#include "c10d/group/elastic_job.h"

namespace torchft_ext {

pybind11::dict dictOf(const JobState& state);  // with the GIL

}  // namespace torchft_ext
