#include "host/schedule_runner.h"

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "host/local_step.h"
#include "host/schedule_progress.h"
#include "host/turn.h"

namespace torchft_ext {
namespace {

std::string bytesText(uint64_t bytes) {
  return std::to_string(bytes) + " bytes";
}

}  // namespace

struct ScheduleRunner::Impl {
  struct Pending {
    std::shared_ptr<OpState> state;
    Operation operation;
  };
  struct Running {
    Pending pending;
    uint64_t signature;
    ScheduleProgress progress;
  };
  // A mismatch has a text; else the frame is wanted now, or not yet.
  struct HeaderCheck {
    enum class Kind { kTake, kWait, kMismatch } kind;
    std::string text;
  };

  // One peer's collective channel.
  struct Channel : ConnectionReceiver {
    Channel(Impl& owner, int rank, Connection* its_connection)
        : runner(owner), peer(rank), connection(its_connection) {}

    Receipt onHeader(const FrameHeader& header) override { return runner.onHeader(*this, header); }
    void onFrame(const FrameHeader& /*header*/) override { runner.onFrame(*this); }
    void onText(const FrameHeader& header, std::string /*payload*/) override {
      const bool nudges = header.type == FrameType::kNudge;
      if (nudges && runner.callbacks.nudged) runner.callbacks.nudged();
      if (!nudges && runner.callbacks.left) runner.callbacks.left(peer, header);
    }
    void onBroken(const std::string& why, bool clean) override {
      receiving = ScheduleProgress::kNone;
      if (runner.callbacks.broken) runner.callbacks.broken(peer, why, clean);
    }
    uint8_t* stagingFor(size_t bytes) {
      // Uninitialised: the connection fills it before it is read.
      if (staging_bytes < bytes) staging.reset(new uint8_t[bytes]);
      staging_bytes = std::max(staging_bytes, bytes);
      return staging.get();
    }

    Impl& runner;
    const int peer;
    Connection* const connection;
    std::optional<FrameHeader> waiting;  // offered, and answered with kWait
    int receiving = ScheduleProgress::kNone;
    size_t sends_under_way = 0;
    uint64_t frames_sent = 0;  // of the running operation
    uint64_t frames_received = 0;
    std::unique_ptr<uint8_t[]> staging;
    size_t staging_bytes = 0;
  };

  Impl(EventLoop& event_loop, int own_rank, int world, ScheduleTuning its_tuning, Callbacks calls)
      : loop(event_loop),
        rank(own_rank),
        size(world),
        tuning(its_tuning),
        callbacks(std::move(calls)) {}

  Receipt onHeader(Channel& channel, const FrameHeader& header);
  void onFrame(Channel& channel);
  void onSent(int peer, int step, uint32_t operation);

  HeaderCheck judge(const Channel& channel, const FrameHeader& header) const;
  HeaderCheck judgeOther(const Channel& channel, const FrameHeader& header) const;

  void advance();
  void start();
  void run(Pending& pending);
  void exchange();
  bool exchangesAreOver();
  void countExchange();
  void complete();
  void goOnLater();
  bool runLocal();
  void finish(int step);
  void pumpSends(Channel& channel);
  void reconsider(Channel& channel);
  Channel* channelOf(int peer) const { return channels[static_cast<size_t>(peer)].get(); }

  void fail(FailureKind kind, int culprit, std::string how);
  template <typename Body>
  void guarded(Body body);
  void later(std::function<void()> body);

  EventLoop& loop;
  const int rank;
  const int size;
  const ScheduleTuning tuning;
  const Callbacks callbacks;
  std::vector<std::unique_ptr<Channel>> channels;  // null at own rank
  std::deque<Pending> queue;
  std::unique_ptr<Running> running;
  uint64_t due = 0;      // the index of the running operation, or of the next one
  bool over = false;     // failed or cancelled: nothing more is done
  bool goes_on = false;  // in another turn
  std::vector<int> may_begin;
  const std::shared_ptr<bool> alive =
      std::make_shared<bool>(true);  // for tasks that may outlive this
};

// ---------------------------------------------------------------- frames

Receipt ScheduleRunner::Impl::onHeader(Channel& channel, const FrameHeader& header) {
  Receipt receipt;
  receipt.kind = Receipt::Kind::kWait;
  if (over) return receipt;
  if (header.type == FrameType::kGoodbye || header.type == FrameType::kNudge) {
    receipt.kind = Receipt::Kind::kText;
    return receipt;
  }
  if (header.type != FrameType::kData) {
    receipt.kind = Receipt::Kind::kBreak;
    receipt.why = "a frame of type " + std::to_string(static_cast<int>(header.type)) +
                  " on a collective channel";
    return receipt;
  }
  const HeaderCheck checked = judge(channel, header);
  if (checked.kind == HeaderCheck::Kind::kMismatch) {
    fail(FailureKind::kMismatch, channel.peer, checked.text);
  } else if (checked.kind == HeaderCheck::Kind::kWait) {
    channel.waiting = header;
  } else {
    guarded([&] {
      const Step& step = running->progress.step(running->progress.nextReceive(channel.peer));
      receipt.into =
          step.kind == Step::Kind::kRecvReduce ? channel.stagingFor(step.bytes) : step.data;
      receipt.kind = Receipt::Kind::kInto;
      channel.receiving = running->progress.nextReceive(channel.peer);
    });
  }
  return receipt;
}

ScheduleRunner::Impl::HeaderCheck ScheduleRunner::Impl::judge(const Channel& channel,
                                                              const FrameHeader& header) const {
  if (header.seq != due || !running) return judgeOther(channel, header);
  const ScheduleProgress& progress = running->progress;
  const int next = progress.nextReceive(channel.peer);
  if (header.tag != running->signature)
    return {HeaderCheck::Kind::kMismatch,
            describeDifference(header.tag, running->signature, due, rank)};
  if (next == ScheduleProgress::kNone) {
    return {HeaderCheck::Kind::kMismatch, "it sent " + bytesText(header.length) + " in " +
                                              describeSignature(header.tag) + ", of which rank " +
                                              std::to_string(rank) + " expects none"};
  }
  if (header.length != progress.step(next).bytes || header.aux != channel.frames_received) {
    return {HeaderCheck::Kind::kMismatch,
            "it sent " + bytesText(header.length) + " in " + describeSignature(header.tag) +
                " (part " + std::to_string(header.aux) + "), where rank " + std::to_string(rank) +
                " expects " + bytesText(progress.step(next).bytes) + " (part " +
                std::to_string(channel.frames_received) + ")"};
  }
  return {progress.mayBegin(next) ? HeaderCheck::Kind::kTake : HeaderCheck::Kind::kWait, {}};
}

// A frame of an operation that is not the running one.
ScheduleRunner::Impl::HeaderCheck ScheduleRunner::Impl::judgeOther(
    const Channel& channel, const FrameHeader& header) const {
  const std::string theirs = describeSignature(header.tag) + " (collective " +
                             std::to_string(header.seq) + " of the generation)";
  if (header.seq < due) {
    return {HeaderCheck::Kind::kMismatch, "it sent " + bytesText(header.length) + " in " + theirs +
                                              ", which is over on rank " + std::to_string(rank)};
  }
  const bool owes =
      running && running->progress.nextReceive(channel.peer) != ScheduleProgress::kNone;
  if (!owes) return {HeaderCheck::Kind::kWait, {}};
  return {HeaderCheck::Kind::kMismatch,
          "it went on to " + theirs + " while rank " + std::to_string(rank) + " expects " +
              bytesText(running->progress.step(running->progress.nextReceive(channel.peer)).bytes) +
              " from it in " + describeSignature(running->signature) + " (collective " +
              std::to_string(due) + ")"};
}

void ScheduleRunner::Impl::onFrame(Channel& channel) {
  const int index = std::exchange(channel.receiving, ScheduleProgress::kNone);
  if (over || index == ScheduleProgress::kNone) return;
  guarded([&] {
    const Step& step = running->progress.step(index);
    if (step.kind == Step::Kind::kRecvReduce)
      reduceReceived(step, channel.staging.get(), running->pending.operation);
    running->progress.takeReceive(channel.peer);
    ++channel.frames_received;
    finish(index);
    advance();
  });
}

// An operation is not over while a send of it is under way: the check only guards against a faulty
// connection.
void ScheduleRunner::Impl::onSent(int peer, int step, uint32_t operation) {
  if (over || !running || operation != static_cast<uint32_t>(due)) return;
  --channelOf(peer)->sends_under_way;
  guarded([&] {
    finish(step);
    advance();
  });
}

// ---------------------------------------------------------------- running

void ScheduleRunner::Impl::advance() {
  while (!over) {
    if (!running) {
      if (queue.empty()) return;
      if (!copySome(queue.front().operation.loads)) return goOnLater();
      start();
    }
    if (!runLocal()) return goOnLater();
    if (over || !running->progress.done()) return;
    if (!exchangesAreOver()) {
      if (goes_on) return;
      continue;
    }
    if (!copySome(running->pending.operation.stores)) return goOnLater();
    complete();
  }
}

void ScheduleRunner::Impl::goOnLater() {
  if (std::exchange(goes_on, true)) return;
  later([this] {
    goes_on = false;
    guarded([this] { advance(); });
  });
}

void ScheduleRunner::Impl::start() {
  Pending& pending = queue.front();
  if (pending.operation.exchanges) pending.operation.exchanges->begin();
  pending.state->noteStarted();
  run(pending);
  queue.pop_front();
  exchange();
}

void ScheduleRunner::Impl::run(Pending& pending) {
  ScheduleProgress progress(makeSchedule(pending.operation, rank, size, tuning), size);
  const uint64_t signature = signatureOf(pending.operation);
  running.reset(new Running{std::move(pending), signature, std::move(progress)});
}

void ScheduleRunner::Impl::exchange() {
  for (const auto& channel : channels) {
    if (!channel) continue;
    channel->frames_sent = 0;
    channel->frames_received = 0;
    pumpSends(*channel);
    reconsider(*channel);
  }
}

// False: the operation goes on, with another exchange or in another turn; or it has failed.
bool ScheduleRunner::Impl::exchangesAreOver() {
  Operation& operation = running->pending.operation;
  if (!operation.exchanges) return true;
  const Exchanges::Next next = operation.exchanges->next(operation);
  switch (next.kind) {
    case Exchanges::Next::Kind::kDone:
      return true;
    case Exchanges::Next::Kind::kExchange:
      countExchange();
      run(running->pending);
      exchange();
      return false;
    case Exchanges::Next::Kind::kLater:
      goOnLater();
      return false;
    case Exchanges::Next::Kind::kMismatch:
      fail(FailureKind::kMismatch, next.culprit, next.how);
      return false;
  }
  return true;
}

// Each exchange has an index of its own: a faster member's next one waits for ours.
void ScheduleRunner::Impl::countExchange() {
  ++due;
  if (callbacks.exchanged) callbacks.exchanged();
}

void ScheduleRunner::Impl::complete() {
  const std::unique_ptr<Running> done = std::move(running);
  countExchange();
  done->pending.state->complete(nullptr);
}

// False: there is more to do, in another turn.
bool ScheduleRunner::Impl::runLocal() {
  size_t bytes = 0;
  while (running->progress.hasLocal()) {
    if (bytes >= kLocalBytesPerTurn) return false;
    const int index = running->progress.takeLocal();
    const Step& step = running->progress.step(index);
    runLocalStep(step, running->pending.operation, size);
    bytes += step.bytes;
    finish(index);
  }
  return true;
}

void ScheduleRunner::Impl::finish(int step) {
  may_begin.clear();
  running->progress.finish(step, &may_begin);
  for (const int index : may_begin) {
    const Step& next = running->progress.step(index);
    if (next.kind == Step::Kind::kSend) {
      pumpSends(*channelOf(next.peer));
    } else {
      reconsider(*channelOf(next.peer));
    }
  }
}

void ScheduleRunner::Impl::pumpSends(Channel& channel) {
  for (int index = running->progress.nextSend(channel.peer);
       index != ScheduleProgress::kNone && running->progress.mayBegin(index);
       index = running->progress.nextSend(channel.peer)) {
    running->progress.takeSend(channel.peer);
    const Step& step = running->progress.step(index);
    FrameHeader header;
    header.type = FrameType::kData;
    header.length = step.bytes;
    header.seq = due;
    header.tag = running->signature;
    header.aux = channel.frames_sent++;
    ++channel.sends_under_way;
    channel.connection->send(
        header, step.data,
        [this, peer = channel.peer, index, operation = static_cast<uint32_t>(due)] {
          onSent(peer, index, operation);
        });
  }
}

// Called whenever what a waiting frame waits for may have happened: its step may begin, or its
// operation does.
void ScheduleRunner::Impl::reconsider(Channel& channel) {
  if (!channel.waiting || judge(channel, *channel.waiting).kind == HeaderCheck::Kind::kWait) return;
  channel.waiting.reset();
  channel.connection->resume();
}

// ---------------------------------------------------------------- failing

void ScheduleRunner::Impl::fail(FailureKind kind, int culprit, std::string how) {
  if (std::exchange(over, true)) return;
  Failure failure;
  failure.kind = kind;
  failure.cause.rank = culprit;
  failure.cause.how = std::move(how);
  if (running) {
    failure.op = toString(running->pending.operation.kind);
    failure.seq = running->pending.state->seq();
  }
  // Not from within a connection's call: the owner ends the connections, and this runner, when it
  // hears of it.
  later([this, failure] {
    if (callbacks.failed) callbacks.failed(failure);
  });
}

template <typename Body>
void ScheduleRunner::Impl::guarded(Body body) {
  try {
    body();
  } catch (const std::bad_alloc&) {
    fail(FailureKind::kAborted, rank,
         "it ran out of memory for the buffers of its collective: Cannot allocate memory");
  } catch (const std::exception& thrown) {
    fail(FailureKind::kInternal, rank, std::string("its collective threw: ") + thrown.what());
  }
}

void ScheduleRunner::Impl::later(std::function<void()> body) {
  loop.post([body = std::move(body), weak = std::weak_ptr<bool>(alive)] {
    if (!weak.expired()) body();
  });
}

// ---------------------------------------------------------------- the runner

ScheduleRunner::ScheduleRunner(EventLoop& loop, int rank, int size,
                               std::vector<Connection*> connections, ScheduleTuning tuning,
                               Callbacks callbacks)
    : impl_(std::make_unique<Impl>(loop, rank, size, tuning, std::move(callbacks))) {
  for (size_t peer = 0; peer < connections.size(); ++peer) {
    impl_->channels.push_back(
        connections[peer] == nullptr
            ? nullptr
            : std::make_unique<Impl::Channel>(*impl_, static_cast<int>(peer), connections[peer]));
  }
  for (const auto& channel : impl_->channels) {
    if (channel) channel->connection->setReceiver(channel.get());
  }
}

ScheduleRunner::~ScheduleRunner() = default;

void ScheduleRunner::add(std::shared_ptr<OpState> state, Operation operation) {
  impl_->queue.push_back({std::move(state), std::move(operation)});
  if (impl_->running || impl_->goes_on) return;
  impl_->guarded([this] { impl_->advance(); });
}

bool ScheduleRunner::idle() const {
  return !impl_->running && impl_->queue.empty();
}

Collectives::First ScheduleRunner::first() const {
  if (!impl_->running && impl_->queue.empty()) return {};
  const Impl::Pending& oldest = impl_->running ? impl_->running->pending : impl_->queue.front();
  return {oldest.state, oldest.operation.root};
}

uint64_t ScheduleRunner::done() const {
  return impl_->due;
}

bool ScheduleRunner::needsNow(int peer) const {
  return impl_->running && impl_->running->progress.undoneWith(peer) > 0;
}

bool ScheduleRunner::needs(int peer) const {
  if (needsNow(peer)) return true;
  for (const Impl::Pending& pending : impl_->queue) {
    const Schedule schedule =
        makeSchedule(pending.operation, impl_->rank, impl_->size, impl_->tuning);
    for (const Step& step : schedule.steps) {
      if (step.peer == peer) return true;
    }
  }
  return false;
}

Collectives::Pending ScheduleRunner::cancelAll() {
  impl_->over = true;
  for (const auto& channel : impl_->channels) {
    if (!channel) continue;
    const bool in_user_memory =
        channel->receiving != ScheduleProgress::kNone || channel->sends_under_way > 0;
    if (in_user_memory) channel->connection->close();
  }
  Pending all;
  if (impl_->running) {
    Impl::Pending& pending = impl_->running->pending;
    all.emplace_back(std::move(pending.state), std::move(pending.operation));
    impl_->running.reset();
  }
  for (Impl::Pending& pending : impl_->queue) {
    all.emplace_back(std::move(pending.state), std::move(pending.operation));
  }
  impl_->queue.clear();
  return all;
}

}  // namespace torchft_ext
