#include "python/callback_future.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "comm/callbacks.h"
#include "python/docstrings.h"
#include "python/held_error.h"

namespace py = pybind11;

// Objects are held by their base's pointer. pybind11 finds an object's owner by shared_from_this(),
// and casts it to the holder's type: down from a base without virtual functions that is impossible.
template <>
struct pybind11::detail::is_holder_type<torchft_ext::CallbackFuture,
                                        std::shared_ptr<torchft_ext::PlainFuture>>
    : std::true_type {};

namespace torchft_ext {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

void pass(const FuturePtr& from, const FuturePtr& to) {
  if (from->hasError()) {
    to->setError(from->exception_ptr());
  } else {
    to->markCompleted(from->value());
  }
}

}  // namespace

// Its own callback's place, for the future that comes of it.
FtWork::Source CallbackFuture::nextCallback() {
  const uint64_t index = source_.callbacks->fetch_add(1);
  FtWork::Source next{std::nullopt, source_.lifecycle, std::make_shared<std::atomic<uint64_t>>(0)};
  if (source_.path) next.path = source_.path->callback(index);
  return next;
}

// A future that is completed as this one is, on a callback thread: torch's runs callbacks on
// whichever thread completes it, or adds them to one that is complete.
std::shared_ptr<PlainFuture> CallbackFuture::gate() const {
  return std::make_shared<PlainFuture>(fut->createInstance(fut->elementType()));
}

namespace {

void open(const FuturePtr& from, const FuturePtr& gate, const std::shared_ptr<Lifecycle>& whose) {
  from->addCallback([gate, whose](c10::ivalue::Future& complete) {
    const auto source = FuturePtr::reclaim_copy(&complete);
    // Posted from a callback thread too: a callback that waited for its future's next one would
    // otherwise stand in front of that on one stack.
    // At exit there are no callback threads any more.
    if (!runOnCallbackThread([source, gate] { pass(source, gate); }, whose)) pass(source, gate);
  });
}

}  // namespace

// The callback is given this future, as torch's is.
py::function CallbackFuture::placed(py::function callback, std::optional<CallbackPath> path) {
  auto self = std::static_pointer_cast<CallbackFuture>(shared_from_this());
  return py::cpp_function(
      [self, callback = std::move(callback), path](const py::object& /*gate*/) -> py::object {
        const CallbackScope scope(path);
        return callback(self);
      });
}

std::shared_ptr<CallbackFuture> CallbackFuture::thenOnPool(py::function callback) {
  FtWork::Source next = nextCallback();
  const auto opened = gate();
  const auto child = opened->then(placed(std::move(callback), next.path));
  open(fut, opened->fut, source_.lifecycle);
  return std::make_shared<CallbackFuture>(child->fut, std::move(next));
}

void CallbackFuture::addDoneCallback(py::function callback) {
  const auto opened = gate();
  opened->add_done_callback(placed(std::move(callback), nextCallback().path));
  open(fut, opened->fut, source_.lifecycle);
}

py::object CallbackFuture::waitInTurn() {
  if (!fut->completed()) {
    const CallbackWaits waits;
    fut->wait();
  }
  return PlainFuture::wait();
}

// A callback of torch's own futures runs on whichever thread completes them: what it issues has no
// place that is the same on all ranks.
py::object callNameless(const py::function& callback, const py::object& future) {
  const CallbackScope scope(std::nullopt);
  return callback(future);
}

py::object futureOf(FtWork& work) {
  auto future = work.getFuture();
  auto source = work.source();
  if (!source) return py::cast(std::make_shared<PlainFuture>(std::move(future)));
  return py::cast(std::make_shared<CallbackFuture>(std::move(future), std::move(*source)));
}

// The callbacks of several of them take turns, and have no name for what they issue.
OperationPromise::OperationPromise()
    : future_(std::make_shared<CallbackFuture>(
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors()),
          FtWork::Source{std::nullopt, nullptr, std::make_shared<std::atomic<uint64_t>>(0)})) {}

void OperationPromise::complete(std::vector<at::Tensor> outputs) {
  const py::gil_scoped_release no_gil;  // callbacks of C++ may want it
  future_->fut->markCompleted(c10::IValue(std::move(outputs)));
}

void OperationPromise::fail(const py::object& error, const py::object& made_anew) {
  const py::type kind = py::type::of(error);
  const std::string text =
      std::string(py::str(kind.attr("__name__"))) + ": " + std::string(py::str(error));
  const auto held = std::make_exception_ptr(HeldError(kind, made_anew, text));
  const py::gil_scoped_release no_gil;
  future_->fut->setError(held);
}

void bind_future(py::module_& module) {
  module.def("_call_nameless", &callNameless, py::arg("callback"), py::arg("future"));
  py::class_<CallbackFuture, PlainFuture, std::shared_ptr<PlainFuture>>(module, "Future",
                                                                        docs::Future::about)
      .def("then", &CallbackFuture::thenOnPool, py::arg("callback"), docs::Future::then)
      .def("add_done_callback", &CallbackFuture::addDoneCallback, py::arg("callback"),
           docs::Future::add_done_callback)
      .def("wait", &CallbackFuture::waitInTurn, py::call_guard<py::gil_scoped_release>(),
           docs::Future::wait);
  py::class_<OperationPromise>(module, "_Promise")
      .def(py::init<>())
      .def_property_readonly("future", &OperationPromise::future)
      .def("complete", &OperationPromise::complete, py::arg("outputs"))
      .def("fail", &OperationPromise::fail, py::arg("error"), py::arg("made_anew"));
}

}  // namespace torchft_ext
