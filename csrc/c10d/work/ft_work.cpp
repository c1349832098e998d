#include "c10d/work/ft_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "base/host_name.h"
#include "base/log.h"
#include "c10d/work/comm_error.h"
#include "comm/callback_path.h"
#include "comm/callbacks.h"
#include "host/host_engine.h"

namespace torchft_ext {
namespace {

// How long wait() gives the callback threads to complete the futures; not while a callback that
// does not wait, so user code, has run for longer than the second.
constexpr std::chrono::milliseconds kFuturesMayTake{100};
constexpr std::chrono::milliseconds kCallbackMayTake{1};

// Past its deadline an operation completes as soon as the engine is out of its buffers; this is how
// long that may take.
constexpr std::chrono::seconds kGrace{1};

bool allDone(const FtWork::States& states) {
  return std::all_of(states.begin(), states.end(), [](const auto& state) { return state->done(); });
}

FailurePtr firstFailure(const FtWork::States& states) {
  for (const auto& state : states) {
    if (FailurePtr failure = state->failure()) return failure;
  }
  return nullptr;
}

// Runs `then` at once where all are done, else on a callback thread.
void whenAllDone(const FtWork::States& states, std::function<void()> then) {
  if (allDone(states)) return then();
  auto left = std::make_shared<std::atomic<size_t>>(states.size());
  auto shared_then = std::make_shared<std::function<void()>>(std::move(then));
  for (const auto& state : states) {
    state->onDone([left, shared_then] {
      if (left->fetch_sub(1) == 1) (*shared_then)();
    });
  }
}

// Waits for a state whose generation has failed; pending signals have had their say.
void settle(OpState& state, Deadline until) noexcept {
  try {
    state.wait(until);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the reason is below
    // Another signal while the first is being answered: the first one's exception is on its way.
  }
}

// Once its generation has failed: it is complete when the engine is out of its tensors, or at
// `until`.
void release(OpState& state, Deadline until, const FailurePtr& why) {
  settle(state, until);
  if (state.done()) return;
  log(LogLevel::kError,
      why->describe() + " (the engine has not let go of its tensors: they stay alive)");
  const auto& lifecycle = state.lifecycle();
  const FailurePtr failed = lifecycle ? lifecycle->failure() : nullptr;
  state.complete(failed ? failed : why);
}

c10::TypePtr typeOf(const FtWork::Outputs& outputs) {
  c10::TypePtr list = c10::ListType::create(c10::TensorType::get());
  return outputs.size() > 1 ? c10::ListType::create(std::move(list)) : list;
}

// Of outputs on a device: callbacks then run under streams, and what they enqueue comes before
// whatever waits for their own futures.
std::vector<c10::Device> devicesOf(const FtWork::Outputs& outputs) {
  for (const auto& tensors : outputs) {
    for (const at::Tensor& tensor : tensors)
      if (!tensor.is_cpu()) return {tensor.device()};
  }
  return {};
}

c10::IValue valueOf(const FtWork::Outputs& outputs) {
  if (outputs.empty()) return c10::IValue(std::vector<at::Tensor>());
  return outputs.size() > 1 ? c10::IValue(outputs) : c10::IValue(outputs.front());
}

c10d::WorkResult resultOf(const FailurePtr& failure) {
  if (!failure) return c10d::WorkResult::SUCCESS;
  return failure->kind == FailureKind::kTimeout ? c10d::WorkResult::TIMEOUT
                                                : c10d::WorkResult::COMM_ERROR;
}

// A user's callback that throws must not take its thread with it.
template <typename Call>
void guarded(const char* what, const Call& call) noexcept {
  try {
    call();
  } catch (const std::exception& error) {
    log(LogLevel::kError, std::string(what) + " threw: " + error.what());
  } catch (...) {
    log(LogLevel::kError, std::string(what) + " threw");
  }
}

}  // namespace

// What is to be called exactly once when the operation is complete.
struct FtWork::Ending {
  Ending(const char* what, std::function<void()> call) : what(what), call(std::move(call)) {}
  void run() {
    // Whichever callback this thread may be in: what runs now is none of its own.
    const CallbackScope nameless{std::nullopt};
    if (!ran.exchange(true)) guarded(what, call);
  }
  const char* const what;
  const std::function<void()> call;
  std::atomic<bool> ran{false};
};

FtWork::FtWork(Described described, States states, std::optional<DeviceCompletion> device)
    : c10d::Work(-1, described.type, described.title, described.inputs),
      may_be_registered_(c10d::allow_inflight_collective_as_graph_input()),
      states_(std::move(states)),
      outputs_(std::move(described.outputs)),
      device_(std::move(device)),
      end_of_profile_(
          recordFunctionEndCallback_
              ? std::make_shared<Ending>("the profiler's callback",
                                         std::exchange(recordFunctionEndCallback_, nullptr))
              : nullptr) {
  if (end_of_profile_) whenAllDone(states_, [end = end_of_profile_] { end->run(); });
}

void FtWork::complete() {
  if (device_) return;
  for (const auto& state : states_) finish(*state, kNoTimeout, Deadline::never());
}

bool FtWork::isCompleted() {
  guard_.check("this operation");
  return allDone(states_);
}

FailurePtr FtWork::failure() const {
  guard_.check("this operation");
  return firstFailure(states_);
}

bool FtWork::isSuccess() const {
  return failure() == nullptr;
}

std::exception_ptr FtWork::exception() const {
  const FailurePtr failed = failure();
  return failed ? exceptionPtr(failed) : nullptr;
}

int FtWork::sourceRank() const {
  guard_.check("this operation");
  const bool knows =
      opType_ == c10d::OpType::RECVANYSOURCE || (opType_ == c10d::OpType::RECV && !device_);
  TORCH_CHECK(knows, "source_rank(): expected a receive into host memory, found ",
              c10d::opTypeToString(opType_), device_ ? " on a device" : "");
  return states_.front()->sourceRank();
}

std::vector<at::Tensor> FtWork::result() {
  // On a device the tensors are good in stream order, whether or not the host can tell.
  TORCH_CHECK(device_ || isCompleted(),
              "result(): the operation has not completed; call wait() first");
  TORCH_CHECK(outputs_.size() <= 1,
              "result(): the operation has a list of lists; use get_future().value()");
  return outputs_.empty() ? std::vector<at::Tensor>() : outputs_.front();
}

void FtWork::synchronize() {
  wait(kNoTimeout);
}

// First of all, so that no way out of the wait leaves it there. Not where it cannot be registered:
// torch makes a registry for each thread that looks into one, and keeps it.
void FtWork::leaveRegistry() {
  if (!may_be_registered_) return;
  c10d::unregister_work(c10::intrusive_ptr<FtWork>::unsafe_reclaim_from_nonowning(this));
}

bool FtWork::wait(std::chrono::milliseconds timeout) {
  guard_.check("this operation");
  leaveRegistry();
  // Of a failed operation too: it may still be in its stream, and what follows must come after it.
  if (device_) device_->blockCurrentStream();
  if (!device_ || device_->hostWaits() || timeout > kNoTimeout) finishAll(timeout);
  if (end_of_profile_) end_of_profile_->run();
  if (const FailurePtr failed = failure()) throwFailure(failed);
  if (device_) device_->releaseTensors();
  return true;
}

void FtWork::check() {
  guard_.check("this operation");
  leaveRegistry();
  try {
    finishAll(kNoTimeout);
    if (const FailurePtr failed = failure()) throwFailure(failed);
  } catch (...) {
    // Its kernel may be on its way out, and what follows must come after it.
    if (device_) device_->orderBehind();
    throw;
  }
}

void FtWork::finishAll(std::chrono::milliseconds timeout) const {
  const Deadline given = timeout > kNoTimeout ? Deadline::after(timeout) : Deadline::never();
  try {
    for (const auto& state : states_) finish(*state, timeout, given);
  } catch (...) {
    awaitFutures();
    throw;
  }
  awaitFutures();
}

void FtWork::finish(OpState& state, std::chrono::milliseconds timeout, Deadline given) const {
  if (state.done()) return;
  const bool own = timeout <= kNoTimeout;
  Deadline until = given;
  // The watchdog fails the generation at the operation's own deadline, so that only explicit ones
  // normally run out here.
  if (own && !state.deadline().isNever()) until = Deadline::at(state.deadline().at() + kGrace);
  if (!waitFor(state, until)) giveUp(state, own ? std::chrono::milliseconds(0) : timeout, until);
}

void FtWork::giveUp(OpState& state, std::chrono::milliseconds timeout, Deadline ran_out) const {
  Failure failure;
  failure.kind = FailureKind::kTimeout;
  failure.op = state.describe();
  failure.seq = state.seq();
  failure.elapsed = Clock::now() - state.issuedAt();
  failure.limit = timeout.count() > 0 ? std::chrono::nanoseconds(timeout)
                                      : std::chrono::nanoseconds(state.timeout());
  const auto& lifecycle = state.lifecycle();
  if (lifecycle) failure.cause.rank = lifecycle->identity().rank;
  failure.cause.host = hostName();
  failure.cause.pid = ::getpid();
  failure.cause.how =
      (timeout.count() > 0 ? "the timeout given to wait() ran out" : "did not complete in time") +
      state.whyItWaited();
  const auto own_failure = std::make_shared<const Failure>(failure);
  const bool first = lifecycle && lifecycle->fail(std::move(failure));
  // All of them: the caller may touch every tensor once wait() has raised.
  for (const auto& each : states_) release(*each, Deadline::at(ran_out.at() + kGrace), own_failure);
  // A state would name the operation's own limit, not the one that ran out.
  if (first && this->failure() && timeout.count() > 0) throwFailure(lifecycle->failure());
}

bool FtWork::waitFor(OpState& state, Deadline deadline) const {
  try {
    return state.wait(deadline);
  } catch (...) {
    failGeneration(FailureKind::kAborted, "a signal interrupted wait()");
    throw;
  }
}

void FtWork::abort() {
  guard_.check("this operation");
  failGeneration(FailureKind::kAborted, "the operation's abort() was called");
}

void FtWork::failGeneration(FailureKind kind, const std::string& how) const {
  const auto& lifecycle = states_.front()->lifecycle();
  if (!lifecycle) return;
  lifecycle->fail(lifecycle->ownFailure(kind, how));
  const Deadline until = Deadline::after(kGrace);
  for (const auto& state : states_) settle(*state, until);
}

FtWork::Promise FtWork::promiseOnce(Promise FtWork::*slot, const std::function<Promise()>& make,
                                    bool* made) {
  MutexLock lock(futures_mutex_);
  Promise& promise = this->*slot;
  *made = !promise.future;
  if (*made) promise = make();
  return promise;
}

// Completed outside of the lock: completion may need the GIL.
FtWork::FuturePtr FtWork::promised(Promise FtWork::*slot, const std::function<Promise()>& make) {
  bool made = false;
  Promise promise = promiseOnce(slot, make, &made);
  if (made) whenAllDone(states_, [ending = promise.ending] { ending->run(); });
  return promise.future;
}

// Who has waited may look into the futures at once, unless user code has the callbacks' turn.
void FtWork::awaitFutures() const {
  if (device_ || !allDone(states_)) return;
  std::vector<Promise> promises;
  {
    MutexLock lock(futures_mutex_);
    promises = {future_, result_future_};
  }
  const Deadline soon = Deadline::after(kFuturesMayTake);
  for (const Promise& promise : promises) {
    if (!promise.future) continue;
    if (onCallbackThread()) promise.ending->run();
    while (!promise.future->completed() && !soon.expired() &&
           presentCallbackRunsFor() < kCallbackMayTake)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> FtWork::getFuture() {
  guard_.check("this operation");
  if (device_) return deviceFuture();
  return promised(&FtWork::future_, [this] {
    auto future = c10::make_intrusive<c10::ivalue::Future>(typeOf(outputs_), devicesOf(outputs_));
    auto complete = [future, states = states_, outputs = outputs_] {
      if (const FailurePtr failed = firstFailure(states)) {
        future->setError(exceptionPtr(failed));
      } else {
        future->markCompleted(valueOf(outputs));
      }
    };
    return Promise{future, std::make_shared<Ending>("a future's callback", std::move(complete))};
  });
}

FtWork::FuturePtr FtWork::deviceFuture() {
  bool made = false;
  const FuturePtr future = promiseOnce(
                               &FtWork::future_,
                               [this] {
                                 return Promise{device_->makeFuture(typeOf(outputs_)), nullptr};
                               },
                               &made)
                               .future;
  if (!made) return future;
  if (const FailurePtr failed = failure()) {
    future->setError(exceptionPtr(failed));
  } else {
    device_->complete(*future, valueOf(outputs_));
  }
  return future;
}

float FtWork::getDuration() const {
  guard_.check("this operation");
  if (device_) return device_->milliseconds();
  Duration longest{0};
  for (const auto& state : states_) {
    const std::optional<Duration> took = state->took();
    TORCH_CHECK(took, "get_duration(): the operation has not completed; call wait() first");
    longest = std::max(longest, *took);
  }
  return std::chrono::duration<float, std::milli>(longest).count();
}

c10::intrusive_ptr<c10::ivalue::Future> FtWork::getFutureResult() {
  guard_.check("this operation");
  return promised(&FtWork::result_future_, [this] {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
    auto complete = [future, states = states_] {
      future->markCompleted(c10::IValue(static_cast<uint8_t>(resultOf(firstFailure(states)))));
    };
    return Promise{future, std::make_shared<Ending>("a future's callback", std::move(complete))};
  });
}

#ifdef TORCHFT_EXT_WORK_HAS_TIMEOUT
std::chrono::milliseconds FtWork::getTimeout() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(states_.front()->timeout());
}
#endif

void FtWork::blockCurrentStream() {
  guard_.check("this operation");
  if (device_) return device_->blockCurrentStream();
  c10d::Work::blockCurrentStream();
}

uint64_t FtWork::getSequencenumber() const {
  return static_cast<uint64_t>(std::max<int64_t>(states_.front()->seq(), 0));
}

std::optional<FtWork::Source> FtWork::source() const {
  if (device_) return std::nullopt;
  const OpState& first = *states_.front();
  return Source{first.path(), first.lifecycle(), callbacks_};
}

}  // namespace torchft_ext
