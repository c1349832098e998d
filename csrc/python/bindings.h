// What module.cpp calls. Every binding that may block releases the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace torchft_ext {

void bind_errors(pybind11::module_& module);  // first: the others raise
void bind_options(pybind11::module_& module);
void bind_backend(pybind11::module_& module);
void bind_ddp(pybind11::module_& module);
void bind_group_stats(pybind11::module_& module);
void bind_elastic(pybind11::module_& module);
void bind_ipc(pybind11::module_& module);
void bind_process(pybind11::module_& module);

}  // namespace torchft_ext
