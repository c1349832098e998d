#include "staged/staging_queue.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "device/devices_end.h"
#include "device/on_device.h"
#include "staged/staging_thread.h"

namespace torchft_ext {
namespace {

constexpr const char* kOwnStream = "what its own process had enqueued before it on its stream";

bool overlap(const Buffer& a, const Buffer& b) {
  return a.bytes > 0 && b.bytes > 0 && a.data < b.data + b.bytes && b.data < a.data + a.bytes;
}

bool overlapAny(const std::vector<Buffer>& some, const std::vector<Buffer>& others) {
  return std::any_of(some.begin(), some.end(), [&others](const Buffer& one) {
    return std::any_of(others.begin(), others.end(),
                       [&one](const Buffer& other) { return overlap(one, other); });
  });
}

int64_t bytesOf(const std::vector<Buffer>& buffers) {
  int64_t bytes = 0;
  for (const Buffer& buffer : buffers) bytes += static_cast<int64_t>(buffer.bytes);
  return bytes;
}

std::string textOf(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours != nullptr ? ours->what_without_backtrace() : error.what();
}

}  // namespace

struct StagingQueue::Look {
  CopyStreams& streams;
  std::array<bool, kLanes> blocked{};  // one before, of that lane, has not been handed over
  bool asks_device = false;

  // False too: to be asked again.
  bool fired(const c10::Event& event) {
    if (event.query()) return true;
    asks_device = true;
    return false;
  }
};

StagingQueue::StagingQueue(std::shared_ptr<Communicator> host, std::shared_ptr<Lifecycle> lifecycle,
                           std::shared_ptr<const DevicePlatform> platform)
    : host_(std::move(host)), lifecycle_(std::move(lifecycle)), platform_(std::move(platform)) {}

StagingQueue::~StagingQueue() = default;

StagingQueue::Lane StagingQueue::laneOf(const Operation& operation) {
  if (operation.kind == OpKind::kSend) return Lane::kSends;
  const bool ordered = isCollective(operation.kind) && operation.name == 0;
  return ordered ? Lane::kOrdered : Lane::kFree;
}

bool StagingQueue::take(std::shared_ptr<OpState>& state, Operation& operation) {
  const Lane lane = laneOf(operation);
  if (!operation.staged && !isBehindOthers(lane)) return false;
  Item item;
  item.state = std::move(state);
  item.operation = std::move(operation);
  item.side = std::static_pointer_cast<StagedSide>(std::move(item.operation.staged));
  item.lane = lane;
  try {
    StagingThread::start();
    if (item.side) noteBegun(item);
  } catch (const std::exception& error) {  // no thread, or a device in error
    failFor(item, textOf(error));
    item.state->complete(whyOver());
    return true;
  }
  item.number = outstanding_.begin();
  StagingThread::count({.pending = 1});
  {
    MutexLock lock(mutex_);
    ++waiting_[static_cast<size_t>(lane)];
    incoming_.push_back(std::move(item));
  }
  StagingThread::attend(shared_from_this());
  return true;
}

void StagingQueue::noteBegun(Item& item) {
  noteDevicesUsed();
  const OnDevice on_device(item.side->current.device());
  item.begun = events_->take(item.side->current.device(), false);
  item.begun->record(item.side->current);
}

bool StagingQueue::isBehindOthers(Lane lane) {
  if (lane == Lane::kFree) return false;
  MutexLock lock(mutex_);
  return waiting_[static_cast<size_t>(lane)] > 0;
}

StagingQueue::Progress StagingQueue::look(CopyStreams& streams) {
  {
    MutexLock lock(mutex_);
    items_.splice(items_.end(), incoming_);
  }
  Progress progress;
  Look look{streams};
  const auto relaxed = platform_->relaxCapture();
  for (auto item = items_.begin(); item != items_.end();) {
    while (guardedStep(item, look)) progress.moved = true;
    if (!item->handed_over) look.blocked[static_cast<size_t>(item->lane)] = true;
    if (item->phase == Phase::kDone) {
      item = items_.erase(item);
    } else {
      ++item;
    }
  }
  progress.asks_device = look.asks_device;
  progress.empty = items_.empty();
  return progress;
}

// An operation whose copies cannot be followed fails its generation. Where the device may still be
// at them, it is kept for good.
bool StagingQueue::guardedStep(Items::iterator item, Look& look) {
  std::optional<OnDevice> on_device;  // what is asked of its events is asked there
  if (item->side) on_device.emplace(item->side->current.device(), std::nothrow);
  try {
    return step(item, look);
  } catch (const std::exception& error) {
    failFor(*item, textOf(error));
  } catch (...) {
    failFor(*item, "an unknown exception");
  }
  if (item->copies) {
    kept_.emplace_back();
    kept_.back().side = std::move(item->side);
    kept_.back().tensors = std::move(item->tensors);
  }
  return finish(*item, whyOver());
}

// True: it has gone on, and may go on further.
bool StagingQueue::step(Items::iterator item, Look& look) {
  const bool blocked = look.blocked[static_cast<size_t>(item->lane)];
  switch (item->phase) {
    case Phase::kQueued:
      if (lifecycle_->over()) return finish(*item, whyOver());
      if (!item->side) return !blocked && handOver(*item);
      return mayLoad(item, look) && load(*item, look);
    case Phase::kLoading:
      return look.fired(*item->copied) && endLoad(*item);
    case Phase::kLoaded:
      if (lifecycle_->over()) return finish(*item, whyOver());
      return !blocked && handOver(*item);
    case Phase::kExchanging:
      if (!item->exchange->done()) return false;
      if (FailurePtr failure = item->exchange->failure()) return finish(*item, failure);
      if (lifecycle_->over()) return finish(*item, whyOver());
      if (item->side->writes.empty()) return finish(*item, nullptr);
      // What its caller had enqueued before it may still use the tensors.
      return look.fired(*item->begun) && store(*item, look);
    case Phase::kStoring:
      if (!look.fired(*item->copied)) return false;
      item->copies = false;
      StagingThread::count({.bytes_stored = bytesOf(item->side->writes)});
      return finish(*item, nullptr);
    case Phase::kDone:
      return false;
  }
  return false;
}

// Without anything to read it may begin before its caller's stream has come so far.
bool StagingQueue::mayLoad(Items::iterator item, Look& look) {
  const std::vector<Buffer>& reads = item->side->reads;
  if (reads.empty()) return true;
  if (!look.fired(*item->begun)) {
    const bool long_wait = Clock::now() >= item->state->askAt();
    if (long_wait && !std::exchange(item->told_wait, true))
      item->state->setWaitedFor(kOwnStream, {});
    return false;
  }
  if (item->lane != Lane::kOrdered) return true;
  return std::none_of(items_.begin(), item, [&reads](const Item& before) {
    return before.side && before.lane == Lane::kOrdered && overlapAny(reads, before.side->writes);
  });
}

bool StagingQueue::load(Item& item, Look& look) {
  item.tensors = std::move(item.operation.keep_alive);
  item.side->allocate(item.operation);
  item.operation.keep_alive = item.side;
  if (item.side->reads.empty()) {
    item.phase = Phase::kLoaded;
    return true;
  }
  const c10::Stream stream =
      look.streams.of(item.side->current.device(), CopyStreams::Direction::kLoad);
  item.copies = true;
  item.side->load(stream);
  item.copied = look.streams.mark(stream);
  item.phase = Phase::kLoading;
  return true;
}

bool StagingQueue::endLoad(Item& item) {
  item.copies = false;
  StagingThread::count({.bytes_loaded = bytesOf(item.side->reads)});
  item.phase = Phase::kLoaded;
  if (lifecycle_->over()) return true;
  std::string objection = item.side->loaded(item.operation);
  if (objection.empty()) return true;
  Failure failure = lifecycle_->ownFailure(FailureKind::kAborted, std::move(objection));
  failure.op = toString(item.state->kind());
  failure.seq = item.state->seq();
  lifecycle_->fail(std::move(failure));
  return true;
}

bool StagingQueue::handOver(Item& item) {
  if (item.side) {
    // Success is the caller's when the results are in its tensors, and counts then.
    item.exchange = std::make_shared<OpState>(lifecycle_, item.state->kind(), item.state->seq(),
                                              item.state->timeout(), item.state->path(),
                                              OpState::Whose::kEngines);
    item.exchange->setPlace(item.state->place());
    item.operation.waited = false;  // by nobody who could help
    item.state->noteStarted();
    item.exchange->onDoneAtOnce([] { StagingThread::wake(); });
    item.phase = Phase::kExchanging;
    host_->issue(item.exchange, std::move(item.operation));
  } else {
    item.phase = Phase::kDone;
    host_->issue(std::move(item.state), std::move(item.operation));
  }
  // Only now: what is issued from here on may go past the queue.
  item.handed_over = true;
  {
    MutexLock lock(mutex_);
    --waiting_[static_cast<size_t>(item.lane)];
  }
  if (item.side) return true;
  StagingThread::count({.pending = -1});
  outstanding_.end(item.number);
  return true;
}

bool StagingQueue::store(Item& item, Look& look) {
  const c10::Stream stream =
      look.streams.of(item.side->current.device(), CopyStreams::Direction::kStore);
  item.copies = true;
  item.side->store(stream);
  item.copied = look.streams.mark(stream);
  item.phase = Phase::kStoring;
  return true;
}

bool StagingQueue::finish(Item& item, FailurePtr failure) {
  StagingThread::count({.operations = failure ? 0 : 1, .pending = -1});
  if (item.exchange) item.state->setSourceRank(item.exchange->sourceRank());
  if (item.state) item.state->complete(std::move(failure));
  item.phase = Phase::kDone;
  if (!std::exchange(item.handed_over, true)) {
    MutexLock lock(mutex_);
    --waiting_[static_cast<size_t>(item.lane)];
  }
  outstanding_.end(item.number);
  return true;
}

void StagingQueue::failFor(const Item& item, const std::string& why) {
  const std::string where = item.side ? item.side->current.device().str() : "a device";
  Failure failure = lifecycle_->ownFailure(
      FailureKind::kInternal, "taking tensors of " + where + " through host memory failed: " + why);
  if (item.state) {
    failure.op = toString(item.state->kind());
    failure.seq = item.state->seq();
  }
  lifecycle_->fail(std::move(failure));
}

FailurePtr StagingQueue::whyOver() const {
  if (FailurePtr failure = lifecycle_->failure()) return failure;
  auto ended = std::make_shared<Failure>();
  ended->kind = FailureKind::kAborted;
  ended->cause.how = "the generation has ended";
  return ended;
}

}  // namespace torchft_ext
