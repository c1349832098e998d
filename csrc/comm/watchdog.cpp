#include "comm/watchdog.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "base/fork.h"

namespace torchft_ext {
namespace {

constexpr size_t kFewestBeforePruning = 64;
constexpr Duration kLookAgain = std::chrono::seconds(1);  // at operations that wait

struct Entry {
  Clock::time_point at;
  std::weak_ptr<OpState> op;
};

// For std::push_heap and its kin: the earliest deadline on top.
bool later(const Entry& a, const Entry& b) {
  return a.at > b.at;
}

void failGenerationOf(const OpState& op) {
  const std::string name = op.describe();
  const std::string number = op.seq() < 0 ? "" : " #" + std::to_string(op.seq());
  Failure failure = op.lifecycle()->ownFailure(
      FailureKind::kTimeout,
      name + number + " did not complete within " + formatSeconds(op.timeout()) + op.whyItWaited());
  failure.op = name;
  failure.seq = op.seq();
  failure.elapsed = Clock::now() - op.issuedAt();
  failure.limit = op.timeout();
  op.lifecycle()->fail(std::move(failure));
}

void tellWaits(const std::vector<std::shared_ptr<OpState>>& waiting) {
  std::map<std::shared_ptr<Lifecycle>, Lifecycle::Operations> by_generation;
  for (const auto& op : waiting) by_generation[op->lifecycle()].push_back(op);
  for (const auto& [lifecycle, operations] : by_generation) lifecycle->tellWaits(operations);
}

}  // namespace

struct Watchdog::Shared {
  using Owners = std::vector<std::shared_ptr<OpState>>;

  const uint64_t fork_count = forkCount();
  Mutex mutex;
  CondVar changed;
  std::vector<Entry> heap GUARDED_BY(mutex);
  size_t prune_at GUARDED_BY(mutex) = kFewestBeforePruning;
  // When an operation in the heap may have waited for longer than its group asks after.
  Clock::time_point look_at GUARDED_BY(mutex) = Clock::time_point::max();
  bool stopping GUARDED_BY(mutex) = false;

  bool inherited() const {
    return fork_count != forkCount();
  }  // then the mutex may be held for good

  // `released` takes what may be an operation's last owner: it is to be destroyed without the lock.
  void pruneLocked(Owners& released) REQUIRES(mutex) {
    std::erase_if(heap, [&released](const Entry& entry) {
      auto op = entry.op.lock();
      if (!op) return true;
      const bool done = op->done();
      released.push_back(std::move(op));
      return done;
    });
    std::make_heap(heap.begin(), heap.end(), later);
    prune_at = std::max(kFewestBeforePruning, 2 * heap.size());
  }

  // What the thread has to do, without the lock.
  struct Due {
    std::vector<Entry> expired;
    Owners waiting;   // for longer than their groups ask after
    Owners released;  // maybe their last owner
    bool empty() const { return expired.empty() && waiting.empty() && released.empty(); }
  };

  void takeExpiredLocked(Clock::time_point now, Due& due) REQUIRES(mutex) {
    while (!heap.empty() && heap.front().at <= now) {
      std::pop_heap(heap.begin(), heap.end(), later);
      due.expired.push_back(std::move(heap.back()));
      heap.pop_back();
    }
  }

  // Once a second at most: operations that do not wait have ended by then, and cost nothing here.
  void lookLocked(Clock::time_point now, Due& due) REQUIRES(mutex) {
    if (now < look_at) return;
    pruneLocked(due.released);
    look_at = Clock::time_point::max();
    for (const auto& op : due.released) {
      if (op->done()) continue;
      const Clock::time_point ask_at = op->askAt();
      if (ask_at <= now) due.waiting.push_back(op);
      look_at = std::min(look_at, ask_at <= now ? now + kLookAgain : ask_at);
    }
  }

  // Waits until there is something to do. False: stopping.
  bool takeDue(Due& due) {
    MutexLock lock(mutex);
    while (!stopping) {
      const auto now = Clock::now();
      takeExpiredLocked(now, due);
      lookLocked(now, due);
      if (!due.empty()) return true;
      const Deadline look = Deadline::at(look_at);
      changed.waitUntil(mutex, heap.empty() ? look : look.orEarlier(Deadline::at(heap.front().at)));
    }
    return false;
  }

  void run() {
    while (true) {
      Due due;
      if (!takeDue(due)) return;
      for (const Entry& entry : due.expired) {
        const auto op = entry.op.lock();
        if (op && !op->done()) failGenerationOf(*op);
      }
      tellWaits(due.waiting);
    }
  }
};

Watchdog::Watchdog()
    : shared_(std::make_shared<Shared>()),
      thread_("ft-watchdog", [shared = shared_] { shared->run(); }) {}

Watchdog::~Watchdog() {
  if (!stop(Deadline::after(std::chrono::seconds(1)))) {
    thread_.abandon("the watchdog is inside a subscriber that does not return");
  }
}

void Watchdog::watch(const std::shared_ptr<OpState>& op) {
  const Deadline deadline = op->deadline();
  const Clock::time_point ask_at = op->askAt();
  if (op->done() || shared_->inherited()) return;
  Shared::Owners released;
  MutexLock lock(shared_->mutex);
  if (shared_->stopping) return;
  if (shared_->heap.size() >= shared_->prune_at) shared_->pruneLocked(released);
  const bool earliest = shared_->heap.empty() || deadline.at() < shared_->heap.front().at ||
                        ask_at < shared_->look_at;
  shared_->look_at = std::min(shared_->look_at, ask_at);
  shared_->heap.push_back({deadline.at(), op});
  std::push_heap(shared_->heap.begin(), shared_->heap.end(), later);
  if (earliest) shared_->changed.notifyAll();
}

std::vector<std::shared_ptr<Lifecycle>> Watchdog::outstanding() const {
  Shared::Owners operations;  // maybe the last owners: destroyed without the lock
  if (shared_->inherited()) return {};
  {
    MutexLock lock(shared_->mutex);
    for (const Entry& entry : shared_->heap) {
      if (auto op = entry.op.lock()) operations.push_back(std::move(op));
    }
  }
  std::set<std::shared_ptr<Lifecycle>> generations;
  for (const auto& op : operations) {
    if (!op->done() && op->lifecycle()) generations.insert(op->lifecycle());
  }
  return {generations.begin(), generations.end()};
}

bool Watchdog::stop(Deadline deadline) {
  if (shared_->inherited()) return true;
  {
    MutexLock lock(shared_->mutex);
    shared_->stopping = true;
    shared_->changed.notifyAll();
  }
  return thread_.join(deadline);
}

size_t Watchdog::watchedForTest() {
  MutexLock lock(shared_->mutex);
  return shared_->heap.size();
}

}  // namespace torchft_ext
