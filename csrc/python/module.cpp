// torchft_ext._C. Import torch.distributed first: its classes are the bases of ours.
#include "base/sole_copy.h"
#include "python/bindings.h"

PYBIND11_MODULE(_C, module) {
  torchft_ext::requireSoleCopy();  // an ImportError otherwise
  pybind11::options options;
  options.disable_function_signatures();  // the docstrings begin with those of the stub
  module.doc() = "Native part of torchft_ext; use the names that torchft_ext exports.";
  torchft_ext::bind_errors(module);
  torchft_ext::bind_options(module);
  torchft_ext::bind_backend(module);
  torchft_ext::bind_ddp(module);
  torchft_ext::bind_group_stats(module);
  torchft_ext::bind_elastic(module);
  torchft_ext::bind_ipc(module);
  torchft_ext::bind_process(module);
}
