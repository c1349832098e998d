#include "sim_communicator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "sim_device.h"
#include "sim_faults.h"
#include "sim_reduce.h"
#include "sim_types.h"

namespace torchft_ext::sim {
namespace {

bool isMessage(const NcclCall& call) {
  return call.kind == CallKind::kSend || call.kind == CallKind::kRecv;
}

// What ranks must agree on.
uint32_t fingerprint(const NcclCall& call) {
  const auto op = static_cast<uint32_t>(std::min(call.op, kNcclAvg + 1));
  if (isMessage(call)) return 1;  // NCCL compares bytes only
  return static_cast<uint32_t>(call.kind) << 24 | static_cast<uint32_t>(call.type) << 16 | op << 8;
}

size_t bytesOf(const NcclCall& call) {
  return call.count * sizeOf(call.type);
}

size_t inBytes(const NcclCall& call, int size) {
  const size_t bytes = bytesOf(call);
  return call.kind == CallKind::kReduceScatter ? bytes * static_cast<size_t>(size) : bytes;
}

size_t outBytes(const NcclCall& call, int size) {
  const size_t bytes = bytesOf(call);
  return call.kind == CallKind::kAllgather ? bytes * static_cast<size_t>(size) : bytes;
}

// Its buffers, pinned; nullopt: one of them is not alive.
std::optional<std::vector<Pin>> pinBuffers(const NcclCall& call, int rank, int size) {
  std::vector<Pin> pins;
  const bool rooted = call.kind == CallKind::kBroadcast || call.kind == CallKind::kReduce;
  const bool reads =
      call.kind != CallKind::kRecv && (call.kind != CallKind::kBroadcast || rank == call.peer);
  const bool writes = call.kind != CallKind::kSend &&
                      (!rooted || call.kind == CallKind::kBroadcast || rank == call.peer);
  if (reads) pins.emplace_back(call.in, inBytes(call, size), toString(call.kind));
  if (writes) pins.emplace_back(call.out, outBytes(call, size), toString(call.kind));
  if (call.multiplied && call.multiplied->on_device)
    pins.emplace_back(call.multiplied->on_device, sizeOf(call.multiplied->type), "a factor");
  for (const Pin& pin : pins) {
    if (!pin.ok()) return std::nullopt;
  }
  return pins;
}

}  // namespace

const char* toString(CallKind kind) {
  static constexpr std::array<const char*, 7> kNames = {
      "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "send", "recv"};
  return kNames.at(static_cast<size_t>(kind));
}

// ---- beginning

NcclResult SimCommunicator::join(const std::vector<NcclUniqueId>& ids) {
  MutexLock lock(mutex_);
  if (Faults::instance().take(FaultAction::kHang, "init", rank_)) never_ready_ = true;
  if (const auto delay = Faults::instance().take(FaultAction::kDelay, "init", rank_))
    ready_not_before_ = Clock::now() + milliseconds(delay->ms);
  if (const auto slow = Faults::instance().take(FaultAction::kInProgress, "init", rank_))
    stayInProgressLocked(slow->polls);
  exchange_ = Exchange::open(ids.front());
  if (!exchange_) {
    error_ = NcclResult::kRemoteError;  // connection refused, told by asyncError
  } else {
    const Exchange::Joined joined = exchange_->join(rank_, size_);
    if (joined == Exchange::Joined::kTwice) {
      violation("init: rank " + std::to_string(rank_) + " joined twice");
      error_ = NcclResult::kInvalidUsage;
    }
    if (joined == Exchange::Joined::kDisagrees) error_ = NcclResult::kRemoteError;
  }
  for (size_t i = 1; rank_ == 0 && i < ids.size(); ++i) {
    if (const auto other = Exchange::open(ids[i])) other->dismiss();
  }
  return NcclResult::kInProgress;
}

// ---- state

NcclResult SimCommunicator::poll() {
  MutexLock lock(mutex_);
  if (error_ != NcclResult::kSuccess) return error_;
  if (polls_left_ != 0) {
    if (polls_left_ > 0) --polls_left_;
    return NcclResult::kInProgress;
  }
  if (revoked_) return NcclResult::kSuccess;
  if (!ready_) becomeReady();
  if (!ready_) return NcclResult::kInProgress;
  for (std::vector<NcclCall>& calls : deferred_) {
    for (const NcclCall& call : calls) call.stream->launchPending(false);
    enqueueLocked(std::move(calls));
  }
  deferred_.clear();
  return finalizing_ && outstanding_ > 0 ? NcclResult::kInProgress : NcclResult::kSuccess;
}

void SimCommunicator::becomeReady() {
  if (never_ready_ || Clock::now() < ready_not_before_) return;
  ready_ = exchange_->complete();
}

bool SimCommunicator::inProgress() const {
  MutexLock lock(mutex_);
  if (error_ != NcclResult::kSuccess) return false;
  return polls_left_ != 0 || !deferred_.empty() || (!ready_ && !revoked_);
}

bool SimCommunicator::failed() const {
  MutexLock lock(mutex_);
  return revoked_ || error_ != NcclResult::kSuccess;
}

bool SimCommunicator::revoked() const {
  MutexLock lock(mutex_);
  return revoked_;
}

bool SimCommunicator::running() const {
  MutexLock lock(mutex_);
  return outstanding_ > 0 || !deferred_.empty();
}

void SimCommunicator::revoke() {
  MutexLock lock(mutex_);
  revoked_ = true;
  stop_ = true;
}

void SimCommunicator::beginFinalize() {
  MutexLock lock(mutex_);
  finalizing_ = true;
}

void SimCommunicator::awaitIdle() {
  MutexLock lock(mutex_);
  dropDeferred();
  while (outstanding_ > 0 || (graphs_ > 0 && !revoked_)) idle_.waitUntil(mutex_, Deadline::never());
  freed_ = true;
}

bool SimCommunicator::capturedByGraph() const {
  MutexLock lock(mutex_);
  return graphs_ > 0;
}

bool SimCommunicator::freed() const {
  MutexLock lock(mutex_);
  return freed_;
}

void SimCommunicator::stayInProgress(int polls) {
  MutexLock lock(mutex_);
  stayInProgressLocked(polls);
}

void SimCommunicator::stayInProgressLocked(int polls) {
  polls_left_ = polls < 0 ? polls : polls_left_ + polls;
}

NcclResult SimCommunicator::awaitThrough() {
  while (!stop_) {
    const NcclResult state = poll();
    if (state != NcclResult::kInProgress) return state;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  MutexLock lock(mutex_);
  dropDeferred();
  return NcclResult::kInternalError;
}

void SimCommunicator::dropDeferred() {
  for (const std::vector<NcclCall>& calls : deferred_) {
    for (const NcclCall& call : calls) call.stream->launchPending(false);
  }
  deferred_.clear();  // never launched
}

NcclRedOp SimCommunicator::addPreMulSum(const PreMul& reduction) {
  MutexLock lock(mutex_);
  factors_[next_op_] = reduction;
  return next_op_++;
}

std::optional<PreMul> SimCommunicator::preMulSum(NcclRedOp op) const {
  MutexLock lock(mutex_);
  const auto found = factors_.find(op);
  return found == factors_.end() ? std::nullopt : std::optional<PreMul>(found->second);
}

bool SimCommunicator::dropPreMulSum(NcclRedOp op) {
  MutexLock lock(mutex_);
  return factors_.erase(op) > 0;
}

// ---- operations

NcclResult SimCommunicator::launch(std::vector<NcclCall> calls) {
  for (const NcclCall& call : calls) {
    if (call.stream != calls.front().stream)
      violation("a group uses several streams for one communicator");
    Faults::instance().count(toString(call.kind));
  }
  MutexLock lock(mutex_);
  const std::string point = toString(calls.front().kind);
  if (const auto slow = Faults::instance().take(FaultAction::kInProgress, point, rank_))
    stayInProgressLocked(slow->polls);
  for (const NcclCall& call : calls) call.stream->launchPending(true);
  deferred_.push_back(std::move(calls));
  return NcclResult::kInProgress;
}

void SimCommunicator::enqueueLocked(std::vector<NcclCall> calls) {
  SimStream* const stream = calls.front().stream;
  auto self = shared_from_this();
  if (const auto graph = stream->capture()) {
    ++graphs_;
    captured_before_ = true;
    graph->atEnd([self] {
      MutexLock lock(self->mutex_);
      --self->graphs_;
      if (self->freed_) violation("a graph outlives a communicator that it captured");
      self->idle_.notifyAll();
    });
    stream->enqueue([self, calls] { self->run(calls); });
    return;
  }
  // The real library asks an event of such a one; where it is non-blocking on a thread of its own.
  if (captured_before_ && blocking_) checkQueryAllowed("a launch of a captured communicator");
  ++outstanding_;
  stream->enqueue([self, calls = std::move(calls), launch = launches_++] {
    self->awaitTurn(launch);
    self->run(calls);
    self->turn_ = launch + 1;
    MutexLock lock(self->mutex_);
    --self->outstanding_;
    self->idle_.notifyAll();
  });
}

// As the real library, whose launches of one communicator wait for each other across streams.
void SimCommunicator::awaitTurn(uint64_t launch) const {
  while (!stop_ && turn_ < launch) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

void SimCommunicator::run(const std::vector<NcclCall>& calls) {
  std::vector<NcclCall> messages;
  for (const NcclCall& call : calls) {
    if (isMessage(call)) messages.push_back(call);
  }
  if (stop_ || (!messages.empty() && !runMessages(messages))) return;
  for (const NcclCall& call : calls) {
    if (!isMessage(call) && (stop_ || !runCollective(call))) return;
  }
}

// An injected fault of the operation. True: it ends here, unfinished.
bool SimCommunicator::strike(const NcclCall& call) {
  Faults& faults = Faults::instance();
  const std::string point = toString(call.kind);
  if (const auto delay = faults.take(FaultAction::kDelay, point, rank_)) {
    const Deadline deadline = Deadline::after(milliseconds(delay->ms));
    while (!stop_ && !deadline.expired())
      std::this_thread::sleep_for(std::min<Duration>(deadline.remaining(), milliseconds(1)));
  }
  const auto error = faults.take(FaultAction::kAsyncError, point, rank_);
  if (error) {
    MutexLock lock(mutex_);
    error_ = static_cast<NcclResult>(error->code);
  }
  const auto hang = error ? std::nullopt : faults.take(FaultAction::kHang, point, rank_);
  if (error || hang) hangUntilStopped();
  if (hang && hang->ms > 0) {
    std::this_thread::sleep_for(milliseconds(hang->ms));
    if (call.out != nullptr) std::memset(call.out, 0x55, outBytes(call, size_));
  }
  return stop_;
}

void SimCommunicator::hangUntilStopped() {
  while (!stop_) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

Transfer SimCommunicator::part(const NcclCall& call, bool sending, int peer, const void* data,
                               size_t bytes) const {
  Transfer transfer;
  transfer.channel = isMessage(call) ? Transfer::Channel::kMessage : Transfer::Channel::kCollective;
  transfer.sending = sending;
  transfer.peer = peer;
  transfer.header = {fingerprint(call), isMessage(call) ? 0 : sequence_, bytes};
  transfer.data = static_cast<char*>(const_cast<void*>(data));
  return transfer;
}

bool SimCommunicator::runMessages(const std::vector<NcclCall>& calls) {
  std::vector<std::vector<Pin>> pins;
  std::vector<Transfer> transfers;
  for (const NcclCall& call : calls) {
    if (strike(call)) return false;
    auto pinned = pinBuffers(call, rank_, size_);
    if (!pinned) return false;
    pins.push_back(std::move(*pinned));
    const bool sending = call.kind == CallKind::kSend;
    transfers.push_back(
        part(call, sending, call.peer, sending ? call.in : call.out, bytesOf(call)));
  }
  return exchange()->transfer(rank_, transfers, stop_);
}

bool SimCommunicator::runCollective(const NcclCall& asked) {
  ++sequence_;
  strike(asked);  // a stopped one runs through its steps
  const auto pins = pinBuffers(asked, rank_, size_);
  if (!pins) return false;
  NcclCall call = asked;
  std::vector<char> product;
  if (asked.multiplied) {
    const PreMul& by = *asked.multiplied;
    product = multiplied(asked.in, inBytes(asked, size_) / sizeOf(asked.type), asked.type,
                         by.on_device ? numberAt(by.on_device, by.type) : by.factor);
    call.in = product.data();
  }
  switch (call.kind) {
    case CallKind::kAllreduce:
      return allreduce(call);
    case CallKind::kBroadcast:
      return broadcast(call);
    case CallKind::kReduce:
      return reduce(call);
    case CallKind::kAllgather:
      return allgather(call);
    default:
      return reduceScatter(call);
  }
}

std::shared_ptr<Exchange> SimCommunicator::exchange() const {
  MutexLock lock(mutex_);
  return exchange_;
}

std::vector<Transfer> SimCommunicator::toOthers(const NcclCall& call, size_t stride) const {
  std::vector<Transfer> sends;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const char* from = static_cast<const char*>(call.in) + static_cast<size_t>(peer) * stride;
    sends.push_back(part(call, true, peer, from, bytesOf(call)));
  }
  return sends;
}

std::optional<std::vector<std::vector<char>>> SimCommunicator::gatherParts(
    const NcclCall& call, std::vector<Transfer> sends, const void* own) {
  const size_t bytes = bytesOf(call);
  std::vector<std::vector<char>> parts(static_cast<size_t>(size_), std::vector<char>(bytes));
  if (bytes > 0) std::memcpy(parts[static_cast<size_t>(rank_)].data(), own, bytes);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_)
      sends.push_back(part(call, false, peer, parts[static_cast<size_t>(peer)].data(), bytes));
  }
  if (!exchange()->transfer(rank_, sends, stop_)) return std::nullopt;
  return parts;
}

bool SimCommunicator::reduceParts(const NcclCall& call, std::vector<Transfer> sends,
                                  const void* own) {
  const auto parts = gatherParts(call, std::move(sends), own);
  if (!parts) return false;
  const bool by_one_rank = size_ == 1 && call.multiplied;
  const size_t count = by_one_rank ? reducedByOneRank(call.count, call.type) : call.count;
  reduceBytes(*parts, call.out, count, call.type, call.op);
  return true;
}

bool SimCommunicator::allreduce(const NcclCall& call) {
  return reduceParts(call, toOthers(call, 0), call.in);
}

bool SimCommunicator::broadcast(const NcclCall& call) {
  const size_t bytes = bytesOf(call);
  std::vector<Transfer> transfers;
  if (rank_ == call.peer) {
    if (bytes > 0) std::memmove(call.out, call.in, bytes);
    transfers = toOthers(call, 0);
  } else {
    transfers.push_back(part(call, false, call.peer, call.out, bytes));
  }
  return exchange()->transfer(rank_, transfers, stop_);
}

bool SimCommunicator::reduce(const NcclCall& call) {
  if (rank_ == call.peer) return reduceParts(call, {}, call.in);
  std::vector<Transfer> send = {part(call, true, call.peer, call.in, bytesOf(call))};
  return exchange()->transfer(rank_, send, stop_);
}

bool SimCommunicator::allgather(const NcclCall& call) {
  const size_t bytes = bytesOf(call);
  const auto parts = gatherParts(call, toOthers(call, 0), call.in);
  if (!parts) return false;
  for (size_t rank = 0; rank < parts->size() && bytes > 0; ++rank)
    std::memcpy(static_cast<char*>(call.out) + rank * bytes, (*parts)[rank].data(), bytes);
  return true;
}

bool SimCommunicator::reduceScatter(const NcclCall& call) {
  const size_t bytes = bytesOf(call);
  const char* own = static_cast<const char*>(call.in) + static_cast<size_t>(rank_) * bytes;
  return reduceParts(call, toOthers(call, bytes), own);
}

}  // namespace torchft_ext::sim
