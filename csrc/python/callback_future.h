// The future of an operation on host memory, as Python sees it: torch._C.Future with callbacks that
// know where they stand.
//
// A callback that Python adds runs on a callback thread, never on the caller's, also where the
// future is complete already: so it runs in the same place on all ranks, takes turns with the
// others (comm/callback_pool.h), and what it issues has a name (comm/callback_path.h). Its wait()
// lets other callbacks run.
//
// Owner: Python, and callbacks that have not run. Threads: any that has the GIL. An abort completes
// the operation, and so its future, with the failure. wait() alone blocks, without the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <vector>

#include "c10d/work/ft_work.h"

namespace torchft_ext {

using PlainFuture = torch::jit::PythonFutureWrapper;

class VISIBILITY_HIDDEN CallbackFuture : public PlainFuture {
 public:
  CallbackFuture(c10::intrusive_ptr<c10::ivalue::Future> future, FtWork::Source source)
      : PlainFuture(std::move(future)), source_(std::move(source)) {}

  // then(), add_done_callback() and wait() of torch's.
  std::shared_ptr<CallbackFuture> thenOnPool(pybind11::function callback);
  void addDoneCallback(pybind11::function callback);
  pybind11::object waitInTurn();

 private:
  FtWork::Source nextCallback();
  std::shared_ptr<PlainFuture> gate() const;
  pybind11::function placed(pybind11::function callback, std::optional<CallbackPath> path);

  const FtWork::Source source_;
};

// The future of an operation that Python carries out, and its completion.
//
// Owner: Python. Threads: any that has the GIL. complete() or fail() is called once; none of them
// runs a callback that Python has added. Without either the future never completes.
class VISIBILITY_HIDDEN OperationPromise {
 public:
  OperationPromise();
  const std::shared_ptr<CallbackFuture>& future() const { return future_; }
  void complete(std::vector<at::Tensor> outputs);
  // error: an exception. Each waiter is raised one of its class that is made of `made_anew`: a
  // tuple of arguments; or that itself, if it is an instance.
  void fail(const pybind11::object& error, const pybind11::object& made_anew);

 private:
  const std::shared_ptr<CallbackFuture> future_;
};

// A PlainFuture on device memory. (pybind11 tells the two apart by the static type alone.)
pybind11::object futureOf(FtWork& work);
void bind_future(pybind11::module_& module);

}  // namespace torchft_ext
