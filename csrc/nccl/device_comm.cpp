#include "nccl/device_comm.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/op_state.h"
#include "nccl/nccl_group.h"
#include "nccl/pause.h"
#include "nccl/stream_pool.h"

namespace torchft_ext {
namespace {

// NCCL knows of a peer's end by its sockets alone, and neither who it is nor why: whoever knows
// better, by a goodbye, a death or an abort elsewhere, gets this long to say so.
constexpr Duration kBetterCause = std::chrono::milliseconds(200);

FailureKind kindOf(NcclResult result) {
  return result == NcclResult::kRemoteError ? FailureKind::kConnectionLost : FailureKind::kInternal;
}

bool isError(NcclResult result) {
  return result != NcclResult::kSuccess && result != NcclResult::kInProgress;
}

}  // namespace

DeviceComm::DeviceComm(DeviceCommSetup setup)
    : setup_(std::move(setup)),
      stream_(takeStream(*setup_.platform->cuda, setup_.device, setup_.high_priority)) {}

bool DeviceComm::initialise(const std::vector<NcclUniqueId>& ids, Deadline deadline) {
  const auto init = [self = shared_from_this(), ids, deadline] {
    return self->blocking() ? self->initInGroup(ids, deadline) : self->beginInit(ids, deadline);
  };
  if (!through(init, "beginning", deadline)) return false;
  ready_.store(true, std::memory_order_release);
  return true;
}

bool DeviceComm::connectBothWays(Deadline deadline) {
  const auto exchange = [self = shared_from_this(), byte = scratch(), deadline] {
    return self->exchangeNothing(byte.get(), deadline);
  };
  return through(exchange, "connecting", deadline);
}

NcclResult DeviceComm::exchangeNothing(void* byte, Deadline deadline) {
  const GateEntry entry(gate_, deadline);
  if (!entry.entered()) return NcclResult::kInProgress;  // settle() says why
  NativeStream stream = setup_.platform->cuda->native(*stream_);
  NcclGroup group(api());
  if (group.started() != NcclResult::kSuccess) return group.started();
  const int peer = 1 - setup_.rank;
  const NcclResult sent = api().send(byte, 0, NcclType::kUint8, peer, handle_, stream);
  const NcclResult received = api().recv(byte, 0, NcclType::kUint8, peer, handle_, stream);
  const NcclResult ended = group.end();
  return isError(sent) ? sent : isError(received) ? received : ended;
}

// A call, on the calling thread or, where it may block, beside it; and what it began.
bool DeviceComm::through(const std::function<NcclResult()>& call, const char* doing,
                         Deadline deadline) {
  const OnDevice on_device(setup_.device);
  const auto begun = blocking() ? beside(call, deadline) : std::optional(call());
  if (!begun) return false;
  if (isError(*begun)) {
    fail(*begun, doing);
    return false;
  }
  return settle(deadline);
}

NcclResult DeviceComm::beginInit(const std::vector<NcclUniqueId>& ids, Deadline deadline) {
  const GateEntry entry(gate_, deadline);
  if (!entry.entered()) return NcclResult::kInProgress;  // settle() says why
  return api().init(&handle_, {setup_.rank, setup_.size, ids});
}

std::optional<NcclResult> DeviceComm::beside(const std::function<NcclResult()>& call,
                                             Deadline deadline) {
  const auto started = setup_.calls->start([self = shared_from_this(), call] {
    const OnDevice on_device(self->setup_.device);
    const auto relaxed = self->setup_.platform->cuda->relaxCapture();  // for this thread
    return call();
  });
  return started ? awaitCall(*started, deadline) : NcclResult::kSystemError;
}

// In a group the call itself returns at once with a handle, by which an abort reaches what the
// group's end then waits for.
NcclResult DeviceComm::initInGroup(const std::vector<NcclUniqueId>& ids, Deadline deadline) {
  const GateEntry entry(gate_, deadline);
  if (!entry.entered()) return NcclResult::kInProgress;
  NcclGroup group(api());
  if (group.started() != NcclResult::kSuccess) return group.started();
  NcclInit init{setup_.rank, setup_.size, ids};
  init.blocking = true;
  const NcclResult begun = api().init(&handle_, init);
  known_handle_ = handle_;  // which NCCL writes once more, with the same value
  handle_known_.store(true, std::memory_order_release);
  const NcclResult ended = group.end();
  return begun == NcclResult::kSuccess ? ended : begun;
}

std::optional<NcclResult> DeviceComm::awaitCall(CallThreads::Call& call, Deadline deadline) {
  LeaverGrace leavers;
  while (!setup_.lifecycle->over()) {
    if (const auto result = call.await(deadline.orEarlier(kHookInterval))) return result;
    if (deadline.expired()) return std::nullopt;
    if (setup_.left && leavers.look(*setup_.left, setup_.peer, true, *setup_.lifecycle))
      return std::nullopt;
    runWaitHook();
  }
  return std::nullopt;
}

bool DeviceComm::settle(Deadline deadline) {
  Pause pause;
  LeaverGrace leavers;
  while (!setup_.lifecycle->over()) {
    NcclResult state = NcclResult::kInProgress;
    {
      const GateEntry entry(gate_, deadline);
      if (!entry.entered()) return false;
      const NcclResult asked = api().asyncError(handle_, &state);
      if (isError(asked)) state = asked;
    }
    if (state == NcclResult::kSuccess) return true;
    if (isError(state)) {
      fail(state, ready() ? "running an operation" : "initialising");
      return false;
    }
    if (deadline.expired()) return false;
    if (setup_.left && leavers.look(*setup_.left, setup_.peer, true, *setup_.lifecycle))
      return false;
    pause.next();
  }
  return false;
}

void DeviceComm::fail(NcclResult result, const std::string& doing) {
  if (result != NcclResult::kRemoteError || !betterCauseComes()) tell(result, doing);
}

bool DeviceComm::betterCauseComes() {
  const Deadline deadline = Deadline::after(kBetterCause);
  while (!setup_.lifecycle->over() && !blameLeaver()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // no hook: callers clean up yet
  }
  return true;
}

bool DeviceComm::blameLeaver() {
  const std::optional<Leaver> leaver =
      setup_.left ? setup_.left->neededBy(setup_.peer) : std::nullopt;
  if (leaver) setup_.lifecycle->fail(failureOf(*leaver, kLeftTooSoon));
  return leaver.has_value();
}

void DeviceComm::tell(NcclResult result, const std::string& doing) {
  // NCCL's text for no communicator in particular: this one may be closed by now.
  const std::string text = api().lastError(nullptr);
  setup_.lifecycle->fail(setup_.lifecycle->ownFailure(
      kindOf(result), std::string("NCCL reported '") + toString(result) + "' while " + doing +
                          " its communicator (" + setup_.name + ")" +
                          (text.empty() ? "" : ": " + text)));
}

void DeviceComm::markCaptured(const c10::Stream& stream) {
  if (std::find(capture_streams_.begin(), capture_streams_.end(), stream) == capture_streams_.end())
    capture_streams_.push_back(stream);
  captured_.store(true, std::memory_order_release);
}

bool DeviceComm::captureIsOpen(const CudaApi& cuda) {
  std::erase_if(capture_streams_, [&](const auto& stream) { return !cuda.capturing(stream); });
  return !capture_streams_.empty();
}

std::shared_ptr<void> DeviceComm::scratch() {
  if (!scratch_) {
    const OnDevice on_device(setup_.device);
    scratch_ = std::make_shared<c10::DataPtr>(c10::GetAllocator(setup_.device.type())->allocate(1));
  }
  return {scratch_, scratch_->get()};
}

void DeviceComm::lookForError() {
  if (!ready()) return;
  NcclResult state = NcclResult::kSuccess;
  {
    if (!gate_.tryEnter()) return;
    const NcclResult asked = api().asyncError(handle_, &state);
    if (isError(asked)) state = asked;
    gate_.leave();
  }
  if (!isError(state) || (state == NcclResult::kRemoteError && betterCauseMayCome())) return;
  tell(state, "watching");
}

bool DeviceComm::betterCauseMayCome() {
  if (blameLeaver()) return true;
  MutexLock lock(mutex_);
  if (!remote_error_at_) remote_error_at_ = Clock::now();
  return Clock::now() - *remote_error_at_ < kBetterCause;
}

void DeviceComm::markCut() {
  MutexLock lock(mutex_);
  cut_.store(true, std::memory_order_release);
  changed_.notifyAll();
}

bool DeviceComm::awaitCut(Deadline deadline) {
  MutexLock lock(mutex_);
  while (!cut()) {
    if (deadline.expired()) return false;
    changed_.waitUntil(mutex_, deadline);
  }
  return true;
}

bool DeviceComm::awaitGone(Deadline deadline) {
  MutexLock lock(mutex_);
  while (!gone_) {
    if (deadline.expired()) return false;
    changed_.waitUntil(mutex_, deadline);
  }
  return true;
}

bool DeviceComm::gone() const {
  MutexLock lock(mutex_);
  return gone_;
}

NcclResult DeviceComm::state() const {
  NcclResult state = NcclResult::kSuccess;
  const NcclResult asked = api().asyncError(handle_, &state);
  return isError(asked) ? asked : state;
}

void DeviceComm::markGone() {
  handle_ = nullptr;
  memory_.releaseBuffers();
  MutexLock lock(mutex_);
  gone_ = true;
  at_rest_ = true;
  changed_.notifyAll();
}

void DeviceComm::markAtRest() {
  MutexLock lock(mutex_);
  at_rest_ = true;
  changed_.notifyAll();
}

bool DeviceComm::awaitRest(Deadline deadline) {
  MutexLock lock(mutex_);
  while (!at_rest_) {
    if (deadline.expired()) return false;
    changed_.waitUntil(mutex_, deadline);
  }
  return true;
}

bool DeviceComm::atRest() const {
  MutexLock lock(mutex_);
  return at_rest_;
}

void DeviceComm::keepControl() {
  auto control = setup_.control.lock();
  MutexLock lock(mutex_);
  control_.swap(control);
}

std::shared_ptr<ControlCommunicator> DeviceComm::takeControl() {
  std::shared_ptr<ControlCommunicator> kept;
  {
    MutexLock lock(mutex_);
    kept.swap(control_);
  }
  return kept ? kept : setup_.control.lock();
}

void DeviceComm::madeRoot(const NcclUniqueId& id) {
  MutexLock lock(mutex_);
  root_ = id;
}

std::optional<NcclUniqueId> DeviceComm::abandonedRoot() const {
  if (ready()) return std::nullopt;
  MutexLock lock(mutex_);
  return root_;
}

}  // namespace torchft_ext
