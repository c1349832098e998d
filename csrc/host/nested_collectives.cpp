#include "host/nested_collectives.h"

#include <exception>
#include <map>
#include <new>
#include <string>

#include "host/local_step.h"
#include "host/message_table.h"
#include "host/schedule_progress.h"
#include "host/turn.h"

namespace torchft_ext {
namespace {

// So many steps ask one peer for their bytes at a time: each has its own staging memory, and hides
// the way there and back of the next.
constexpr int kReceivesAhead = 4;

}  // namespace

struct NestedCollectives::Impl {
  struct Running {
    std::shared_ptr<OpState> state;
    Operation operation;
    ScheduleProgress progress;                            // of no step, before prepare()
    std::shared_ptr<Transfer> like{};                     // what its transfers have in common
    std::vector<int> receiving{};                         // by peer: steps that have asked
    std::map<int, std::unique_ptr<uint8_t[]>> staging{};  // by step
    bool loaded = false;
    bool goes_on = false;  // in another turn
  };

  Impl(int own_rank, int world, Messages& its_messages, ScheduleTuning its_tuning,
       Messages::Callbacks calls)
      : rank(own_rank),
        size(world),
        messages(its_messages),
        tuning(its_tuning),
        callbacks(std::move(calls)) {}

  bool keep(uint64_t name, std::unique_ptr<Running> op);
  void prepare(Running& op);
  void advance(uint64_t name);
  bool advanceOnce(Running& op);
  void pump(uint64_t name, Running& op);
  void transfer(uint64_t name, Running& op, int step);
  Operation messageOf(uint64_t name, Running& op, int step);
  bool runLocal(Running& op);
  void finish(Running& op, int step);
  void moved(uint64_t name, int step);
  template <typename Body>
  void guarded(const Operation& operation, Body body);
  void goOnLater(uint64_t name);
  void fail(FailureKind kind, const Operation& operation, std::string how);

  const int rank;
  const int size;
  Messages& messages;
  const ScheduleTuning tuning;
  const Messages::Callbacks callbacks;
  std::map<uint64_t, std::unique_ptr<Running>> running;  // by name
  std::vector<int> may_begin;  // pump() looks at all peers; this only saves allocations
  bool over = false;           // failed or cancelled: nothing more is done
  const std::shared_ptr<bool> alive = std::make_shared<bool>(true);  // for what may outlive this
};

// ---------------------------------------------------------------- transfers

Operation NestedCollectives::Impl::messageOf(uint64_t name, Running& op, int index) {
  const Step& step = op.progress.step(index);
  Operation message;
  message.peer = step.peer;
  message.tag = kTransferTag | name;
  if (step.kind == Step::Kind::kSend) {
    message.kind = OpKind::kSend;
    message.inputs = {{step.data, step.bytes}};
    return message;
  }
  message.kind = OpKind::kRecv;
  uint8_t* into = step.data;
  if (step.kind == Step::Kind::kRecvReduce) {
    // Uninitialised: the connection fills it before it is read.
    std::unique_ptr<uint8_t[]>& staging = op.staging[index];
    staging.reset(new uint8_t[step.bytes]);
    into = staging.get();
  }
  message.outputs = {{into, step.bytes}};
  return message;
}

void NestedCollectives::Impl::transfer(uint64_t name, Running& op, int step) {
  auto what = std::make_shared<Transfer>(*op.like);
  what->done = [this, name, step, weak = std::weak_ptr<bool>(alive)] {
    if (!weak.expired()) moved(name, step);
  };
  messages.transfer(messageOf(name, op, step), std::move(what));
}

// In the list's order for each peer, which is how the two ends match them.
void NestedCollectives::Impl::pump(uint64_t name, Running& op) {
  for (int peer = 0; peer < size; ++peer) {
    for (int step = op.progress.nextSend(peer);
         step != ScheduleProgress::kNone && op.progress.mayBegin(step);
         step = op.progress.nextSend(peer)) {
      op.progress.takeSend(peer);
      transfer(name, op, step);
    }
    int& receiving = op.receiving[static_cast<size_t>(peer)];
    for (int step = op.progress.nextReceive(peer);
         step != ScheduleProgress::kNone && op.progress.mayBegin(step) &&
         receiving < kReceivesAhead;
         step = op.progress.nextReceive(peer)) {
      op.progress.takeReceive(peer);
      ++receiving;
      transfer(name, op, step);
    }
  }
}

void NestedCollectives::Impl::moved(uint64_t name, int index) {
  const auto found = running.find(name);
  if (over || found == running.end()) return;
  Running& op = *found->second;
  guarded(op.operation, [&] {
    const Step& step = op.progress.step(index);
    if (step.kind == Step::Kind::kRecvReduce)
      reduceReceived(step, op.staging.at(index).get(), op.operation);
    op.staging.erase(index);
    if (step.kind != Step::Kind::kSend) --op.receiving[static_cast<size_t>(step.peer)];
    finish(op, index);
  });
  advance(name);
}

// ---------------------------------------------------------------- running

void NestedCollectives::Impl::finish(Running& op, int step) {
  may_begin.clear();
  op.progress.finish(step, &may_begin);
}

bool NestedCollectives::Impl::runLocal(Running& op) {
  size_t bytes = 0;
  while (op.progress.hasLocal()) {
    if (bytes >= kLocalBytesPerTurn) return false;
    const int index = op.progress.takeLocal();
    const Step& step = op.progress.step(index);
    runLocalStep(step, op.operation, size);
    bytes += step.bytes;
    finish(op, index);
  }
  return true;
}

// False: there is more to do, in another turn.
bool NestedCollectives::Impl::advanceOnce(Running& op) {
  if (!op.loaded) {
    if (!copySome(op.operation.loads)) return false;
    op.loaded = true;
  }
  const bool local = runLocal(op);
  pump(op.operation.name, op);
  return local && (!op.progress.done() || copySome(op.operation.stores));
}

// False: another one has that name; this one is kept under what is no name.
bool NestedCollectives::Impl::keep(uint64_t name, std::unique_ptr<Running> op) {
  const bool first = running.count(name) == 0;
  uint64_t place = first ? name : ~uint64_t{0};
  while (running.count(place) != 0) --place;
  running.emplace(place, std::move(op));
  return first;
}

void NestedCollectives::Impl::prepare(Running& op) {
  op.like = std::make_shared<Transfer>();
  op.like->signature = signatureOf(op.operation);
  op.like->described = op.operation.described;
  op.receiving.resize(static_cast<size_t>(size));
  op.progress = ScheduleProgress(makeSchedule(op.operation, rank, size, tuning), size);
}

void NestedCollectives::Impl::advance(uint64_t name) {
  const auto found = running.find(name);
  if (over || found == running.end()) return;
  Running& op = *found->second;
  bool through = false;
  guarded(op.operation, [&] { through = advanceOnce(op); });
  if (over) return;
  if (!through) return goOnLater(name);
  if (!op.progress.done()) return;
  const std::unique_ptr<Running> done = std::move(found->second);
  running.erase(found);
  done->state->complete(nullptr);
}

template <typename Body>
void NestedCollectives::Impl::guarded(const Operation& operation, Body body) {
  try {
    body();
  } catch (const std::bad_alloc&) {
    fail(FailureKind::kAborted, operation,
         "it ran out of memory for the buffers of its collective: Cannot allocate memory");
  } catch (const std::exception& thrown) {
    fail(FailureKind::kInternal, operation, std::string("its collective threw: ") + thrown.what());
  }
}

void NestedCollectives::Impl::goOnLater(uint64_t name) {
  if (std::exchange(running.at(name)->goes_on, true)) return;
  callbacks.later([this, name, weak = std::weak_ptr<bool>(alive)] {
    if (weak.expired()) return;
    const auto found = running.find(name);
    if (found == running.end()) return;
    found->second->goes_on = false;
    advance(name);
  });
}

void NestedCollectives::Impl::fail(FailureKind kind, const Operation& operation, std::string how) {
  if (std::exchange(over, true)) return;
  Failure failure;
  failure.kind = kind;
  failure.cause.rank = rank;
  failure.cause.how = std::move(how);
  failure.op = operation.described;
  // Not from within a connection's call: the owner ends the connections, and this, when it hears of
  // it.
  callbacks.later([this, failure, weak = std::weak_ptr<bool>(alive)] {
    if (!weak.expired()) callbacks.failed(failure);
  });
}

// ---------------------------------------------------------------- the class

NestedCollectives::NestedCollectives(int rank, int size, Messages& messages, ScheduleTuning tuning,
                                     Messages::Callbacks callbacks)
    : impl_(std::make_unique<Impl>(rank, size, messages, tuning, std::move(callbacks))) {}

NestedCollectives::~NestedCollectives() = default;

void NestedCollectives::add(std::shared_ptr<OpState> state, Operation operation) {
  // Less than the tag's own bits: two that are under way at once hardly ever share the rest.
  operation.name &= ~kTransferTag;
  const uint64_t name = operation.name;
  auto owned = std::make_unique<Impl::Running>(Impl::Running{
      std::move(state), std::move(operation), ScheduleProgress(Schedule(), impl_->size)});
  Impl::Running& op = *owned;
  // Before what may fail: cancelAll() is to find it.
  if (!impl_->keep(name, std::move(owned))) {
    return impl_->fail(FailureKind::kMismatch, op.operation,
                       "it issued two collectives in callbacks under one name");
  }
  op.state->noteStarted();
  impl_->guarded(op.operation, [&] { impl_->prepare(op); });
  impl_->advance(name);
}

bool NestedCollectives::idle() const {
  return impl_->running.empty();
}

bool NestedCollectives::needs(int peer) const {
  for (const auto& [name, op] : impl_->running) {
    if (op->progress.undoneWith(peer) > 0) return true;
  }
  return false;
}

std::vector<std::pair<std::shared_ptr<OpState>, Operation>> NestedCollectives::cancelAll() {
  impl_->over = true;
  std::vector<std::pair<std::shared_ptr<OpState>, Operation>> all;
  for (auto& [name, op] : impl_->running)
    all.emplace_back(std::move(op->state), std::move(op->operation));
  impl_->running.clear();
  return all;
}

}  // namespace torchft_ext
