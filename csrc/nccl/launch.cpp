#include "nccl/launch.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/log.h"
#include "nccl/nccl_calls.h"

namespace torchft_ext {
namespace {

// After an interrupted call the streams are ordered behind what NCCL may still launch, if it is
// through by then.
constexpr Duration kCutWithin = std::chrono::seconds(12);
constexpr Duration kAtRestWithin = std::chrono::seconds(2);
constexpr uintptr_t kStreamPerThread = 2;  // cudaStreamPerThread

bool isTransfer(OpKind kind) {
  return kind == OpKind::kSend || kind == OpKind::kRecv;
}

}  // namespace

Launch::Launch(const Context& context, std::vector<Communicator::Issue> issues)
    : context_(context) {
  for (auto& issue : issues) {
    Op op{std::move(issue)};
    op.side = static_cast<StreamSide*>(op.issue.operation.device.get());
    op.number = context_.outstanding->begin();
    if (isTransfer(op.issue.operation.kind)) op.peer = op.issue.operation.peer;
    deadline_ = deadline_.orEarlier(op.issue.state->deadline());
    ops_.push_back(std::move(op));
  }
}

void Launch::run() {
  try {
    // What is asked of streams and events of another device would make a context on this thread's.
    const OnDevice on_device(ops_.front().side->current.device());
    begin();
  } catch (const std::invalid_argument&) {
    completeAll();
    throw;
  } catch (const c10::Error& error) {
    interrupted(error.what_without_backtrace());
  } catch (...) {
    interrupted("the call was interrupted");
    throw;
  }
}

void Launch::begin() {
  refuseUnsupported();
  if (context_.lifecycle->over() || !everyoneIsThere() || !findComms()) return completeAll();
  for (Op& op : ops_) order(op);
  switch (call()) {
    case Called::kNothing:
      return completeAll();
    case Called::kDone:
      for (Op& op : ops_) handOver(op);
      return;
    case Called::kInterrupted:
      return handOverInterrupted();
  }
}

void Launch::refuseUnsupported() {
  const int own = context_.lifecycle->identity().rank;
  for (const Op& op : ops_) {
    std::string why = whyUnsupported(op.issue.operation, *context_.platform->nccl);
    if (why.empty() && op.peer == own)
      why = std::string(toString(op.issue.operation.kind)) +
            ": expected another rank than this one, found " + std::to_string(own);
    if (!why.empty()) throw std::invalid_argument(why);
  }
}

bool Launch::everyoneIsThere() {
  for (const Op& op : ops_) {
    const std::optional<Leaver> left = context_.left->neededBy(op.peer);
    if (!left) continue;
    context_.lifecycle->fail(failureOf(*left, "it left before this operation"));
    return false;
  }
  return true;
}

// All ranks of a batch come to its communicators in the same order, so that none waits for another
// in a circle: the one for all ranks first, then the pairs by (lower rank, higher rank).
bool Launch::findComms() {
  capturing_ = context_.platform->cuda->capturing(ops_.front().side->current);
  const int own = context_.lifecycle->identity().rank;
  std::vector<Op*> sorted;
  sorted.reserve(ops_.size());
  for (Op& op : ops_) sorted.push_back(&op);
  const auto pairOf = [own](const Op* op) {
    return op->peer < 0 ? std::make_pair(-1, -1)
                        : std::make_pair(std::min(own, op->peer), std::max(own, op->peer));
  };
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](const Op* a, const Op* b) { return pairOf(a) < pairOf(b); });
  in_order_.assign(sorted.begin(), sorted.end());
  for (Op* op : sorted) {
    const c10::Device device = op->side->current.device();
    if (capturing_ && !context_.comms->has(device, op->peer))
      throw std::invalid_argument(
          std::string(toString(op->issue.operation.kind)) + " on " + device.str() +
          ": the first such operation of a generation cannot be captured into a graph, since its "
          "communicator has to be made; run one before the capture begins");
    op->comm = context_.comms->get(
        device, op->peer,
        {op->issue.operation.kind, op->issue.state->seq(), op->issue.state->deadline()});
    if (!op->comm) {
      endIfLate(*op);
      return false;
    }
    checkCapture(*op);
    if (op->issue.operation.kind == OpKind::kBarrier) op->scratch = op->comm->scratch();
    if (std::find(used_.begin(), used_.end(), op->comm) == used_.end()) used_.push_back(op->comm);
  }
  return true;
}

// A stream that one graph captures can neither wait for work outside of it nor run any.
void Launch::checkCapture(const Op& op) const {
  const CudaApi& cuda = *context_.platform->cuda;
  const std::string name = toString(op.issue.operation.kind);
  if (cuda.capturing(op.side->current) != capturing_)
    throw std::invalid_argument(name +
                                ": expected all operations of a batch in one graph capture, or all "
                                "outside, found both");
  if (capturing_) return;
  // NCCL asks an event of one that was captured at each later launch, on a thread of its own where
  // it is non-blocking, which ends a capture (ncclLaunchPrepare, 2.28.9).
  if (op.comm->captureIsOpen(cuda))
    throw std::invalid_argument(
        name +
        ": a graph capture has this group's operations in it and has not ended: issue others in "
        "the capture, after its end, or on another group");
  if (cuda.capturing(op.comm->stream()))
    throw std::invalid_argument(
        name +
        ": a graph is being captured on the stream that this group's communicator has, since "
        "torch's pool has given it to both: issue it after the end of the capture, or capture on "
        "another stream");
}

std::shared_ptr<c10::Event> Launch::event(const Op& op, bool timed) {
  const c10::Device device = op.side->current.device();
  return capturing_ ? EventPool::fresh(device, timed)
                    : context_.threads->events->take(device, timed);
}

// The operation's stream waits for what the caller has enqueued so far.
void Launch::order(Op& op) {
  StreamSide& side = *op.side;
  side.stream = side.on_current ? side.current : op.comm->stream();
  op.begun = event(op, false);
  op.begun->record(side.current);
  if (!side.on_current) op.begun->block(*side.stream);
  if (!side.timed) return;
  side.start = event(op, true);
  side.start->record(*side.stream);
}

Launch::Called Launch::call() {
  const DeviceCalls calls = planned();
  const auto result = mayConnect(calls) ? callBeside(calls) : std::optional(callHere(calls));
  if (!called_) return Called::kNothing;
  if (!result) {
    endIfLate(ops_.front());
    return Called::kInterrupted;
  }
  if (*result != NcclResult::kSuccess && *result != NcclResult::kInProgress) {
    used_.front()->fail(*result, "running an operation on");
    return Called::kInterrupted;
  }
  if (*result == NcclResult::kInProgress && !settleAll()) return Called::kInterrupted;
  return Called::kDone;
}

// In the same order on all ranks: kernels of several communicators that do not all fit on a device
// at once must not wait for each other in a circle. Their operations are this object's.
DeviceCalls Launch::planned() const {
  DeviceCalls calls;
  calls.reserve(in_order_.size());
  for (const Op* op : in_order_) {
    calls.push_back({{std::shared_ptr<void>(), &op->issue.operation},
                     op->side->flat,
                     op->comm,
                     context_.platform->cuda->native(*op->side->stream),
                     op->scratch});
  }
  return calls;
}

bool Launch::mayConnect(const DeviceCalls& calls) const {
  // On another thread that handle would be another stream.
  const auto per_thread = [](const DeviceCall& call) {
    return reinterpret_cast<uintptr_t>(call.stream) == kStreamPerThread;
  };
  if (std::any_of(calls.begin(), calls.end(), per_thread)) return false;
  return !capturing_ && std::any_of(used_.begin(), used_.end(), [&](const auto& comm) {
    return comm->blocking() && !comm->shapes().holds(shapeOf(calls, *comm));
  });
}

// kInProgress: NCCL goes on in a thread of its own, and until it is through nothing else may be
// called on these communicators or enqueued on their streams.
NcclResult Launch::callHere(const DeviceCalls& calls) {
  std::vector<std::unique_ptr<GateEntry>> entries;
  for (const auto& comm : used_) {
    entries.push_back(std::make_unique<GateEntry>(comm->gate(), deadline_));
    if (!entries.back()->entered()) return NcclResult::kSuccess;
  }
  const OnDevice on_device(used_.front()->setup().device);
  // What NCCL asks of events must not end another thread's capture; in a capture of this thread's
  // own NCCL sets the mode itself.
  const auto relaxed = capturing_ ? nullptr : context_.platform->cuda->relaxCapture();
  if (capturing_)
    for (const Op& op : ops_) op.comm->markCaptured(*op.side->stream);
  called_ = true;
  load();
  return callInGroup(*context_.platform->nccl, calls);
}

// nullopt: the generation is over, or the deadline has passed; the call may still be under way.
std::optional<NcclResult> Launch::callBeside(const DeviceCalls& calls) {
  DeviceCalls copies = calls;
  for (DeviceCall& call : copies)
    call.operation = std::make_shared<const Operation>(*call.operation);
  called_ = true;
  load();
  const auto call = used_.front()->setup().calls->start(
      [comms = used_, copies = std::move(copies), deadline = deadline_] {
        return callThroughGates(comms, copies, deadline);
      });
  if (!call) return NcclResult::kSystemError;
  const auto result = used_.front()->awaitCall(*call, deadline_);
  if (result == NcclResult::kInProgress) return std::nullopt;  // a gate was not to be entered
  if (result == NcclResult::kSuccess)
    for (const auto& comm : used_) comm->shapes().add(shapeOf(calls, *comm));
  return result;
}

// From here on the buffers reach the poller, whatever happens: what is enqueued here uses them.
void Launch::load() {
  for (Op& op : ops_) {
    if (const auto ahead = std::exchange(op.side->ahead, nullptr)) ahead(*op.side->stream);
  }
  loaded_ = true;
}

bool Launch::settleAll() {
  for (const auto& comm : used_) {
    if (comm->settle(deadline_)) continue;
    endIfLate(ops_.front());
    return false;
  }
  return true;
}

// The watchdog says the same at about this time; this thread must not leave before it is said.
void Launch::endIfLate(const Op& op) {
  if (context_.lifecycle->over() || !op.issue.state->deadline().expired()) return;
  Failure failure = context_.lifecycle->ownFailure(
      FailureKind::kTimeout, std::string(toString(op.issue.operation.kind)) + " #" +
                                 std::to_string(op.issue.state->seq()) +
                                 " was not under way within " +
                                 formatSeconds(op.issue.state->timeout()));
  failure.op = toString(op.issue.operation.kind);
  failure.seq = op.issue.state->seq();
  failure.elapsed = Clock::now() - op.issue.state->issuedAt();
  failure.limit = op.issue.state->timeout();
  context_.lifecycle->fail(std::move(failure));
}

void Launch::recordEnd(Op& op) {
  StreamSide& side = *op.side;
  if (const auto behind = std::exchange(side.behind, nullptr)) behind(*side.stream);
  auto end = event(op, side.timed);
  end->record(*side.stream);
  noteEnd(side, std::move(end));
}

void Launch::noteEnd(StreamSide& side, std::shared_ptr<c10::Event> end) const {
  if (!capturing_) context_.tails->note(*side.stream, end);
  side.end = std::move(end);
}

void Launch::handOver(Op& op) {
  recordEnd(op);
  if (op.issue.state) op.issue.state->noteStarted();
  if (!capturing_) {
    op.side->may_release = true;
    return watch(op, false);
  }
  op.side->captured = true;
  op.handed_over = true;  // to the graph
  complete(op, nullptr);
}

void Launch::watch(Op& op, bool interrupted) {
  Operation& operation = op.issue.operation;
  op.handed_over = true;
  // What the barrier's byte and the user's buffers are owned by.
  auto owners = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
      std::move(operation.keep_alive), std::move(op.scratch));
  context_.threads->poller->watch({std::move(op.issue.state), op.comm, *op.side->stream, op.begun,
                                   op.side->end, std::move(owners), context_.outstanding, op.number,
                                   interrupted, op.side->result_check});
}

// The generation has failed while NCCL was at work on the calls, or because of them. Waiters are
// released as soon as the communicators are cut. `end` is recorded all the same once NCCL has let
// go of the stream, so that whoever orders a stream behind the operation is behind its last kernel.
// If that takes too long, or a signal interrupts it, there is none: nothing may be enqueued there
// while NCCL is at work.
void Launch::handOverInterrupted() {
  if (std::exchange(interrupted_, true)) return;  // and left by a signal
  const OnDevice on_device(ops_.front().side->current.device(), std::nothrow);
  std::exception_ptr signal;  // what the wait hook threw: only once the buffers are handed over
  const auto await = [&](bool (DeviceComm::*ended)(Deadline), Deadline until) {
    for (const auto& comm : used_) {
      while (!signal && !(*comm.*ended)(until.orEarlier(kHookInterval)) && !until.expired()) {
        try {
          runWaitHook();
        } catch (...) {
          signal = std::current_exception();
        }
      }
    }
  };
  await(&DeviceComm::awaitCut, Deadline::after(kCutWithin));
  const FailurePtr failure = whyOver();
  for (Op& op : ops_)
    if (!op.handed_over) complete(op, failure);
  await(&DeviceComm::awaitRest, Deadline::after(kAtRestWithin));
  for (Op& op : ops_) {
    if (op.handed_over || !op.side->stream) continue;
    if (op.comm->atRest()) recordEndOfFailed(op);
    watch(op, true);
  }
  if (signal) std::rethrow_exception(signal);
}

// Whatever goes wrong here, the buffers must still reach the poller.
void Launch::recordEndOfFailed(Op& op) {
  const auto attempt = [](const auto& call) {
    try {
      call();
      return true;
    } catch (const std::exception& error) {
      log(LogLevel::kError,
          std::string("nothing can be enqueued behind a failed operation: ") + error.what());
      return false;
    }
  };
  StreamSide& side = *op.side;
  if (side.end) return;
  if (!loaded_) side.behind = nullptr;  // it would store what was not loaded
  attempt([&] {
    if (const auto behind = std::exchange(side.behind, nullptr)) behind(*side.stream);
  });
  auto end = event(op, side.timed);
  if (attempt([&] { end->record(*side.stream); })) noteEnd(side, std::move(end));
}

void Launch::interrupted(const char* how) {
  context_.lifecycle->fail(context_.lifecycle->ownFailure(FailureKind::kAborted, how));
  if (called_) return handOverInterrupted();
  completeAll();
}

FailurePtr Launch::whyOver() const {
  if (FailurePtr failure = context_.lifecycle->failure()) return failure;
  return std::make_shared<Failure>(context_.lifecycle->ownFailure(
      FailureKind::kAborted,
      context_.lifecycle->over() ? "the generation has ended" : "the operation was refused"));
}

void Launch::complete(Op& op, FailurePtr failure) {
  if (op.issue.state) op.issue.state->complete(std::move(failure));
  context_.outstanding->end(op.number);
}

void Launch::completeAll() {
  const FailurePtr failure = whyOver();
  for (Op& op : ops_) {
    op.side->stream.reset();
    op.side->start.reset();
    op.side->ahead = nullptr;
    op.side->behind = nullptr;
    complete(op, failure);
  }
}

}  // namespace torchft_ext
