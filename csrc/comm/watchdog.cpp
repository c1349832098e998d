#include "comm/watchdog.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "base/fork.h"

namespace torchft_ext {
namespace {

constexpr size_t kFewestBeforePruning = 64;

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
      name + number + " did not complete within " + formatSeconds(op.timeout()));
  failure.op = name;
  failure.seq = op.seq();
  failure.elapsed = Clock::now() - op.issuedAt();
  failure.limit = op.timeout();
  op.lifecycle()->fail(std::move(failure));
}

}  // namespace

struct Watchdog::Shared {
  using Owners = std::vector<std::shared_ptr<OpState>>;

  const uint64_t fork_count = forkCount();
  Mutex mutex;
  CondVar changed;
  std::vector<Entry> heap GUARDED_BY(mutex);
  size_t prune_at GUARDED_BY(mutex) = kFewestBeforePruning;
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

  // What has expired; waits for it. False: stopping.
  bool takeExpired(std::vector<Entry>& expired) {
    MutexLock lock(mutex);
    while (!stopping) {
      const auto now = Clock::now();
      while (!heap.empty() && heap.front().at <= now) {
        std::pop_heap(heap.begin(), heap.end(), later);
        expired.push_back(std::move(heap.back()));
        heap.pop_back();
      }
      if (!expired.empty()) return true;
      changed.waitUntil(mutex, heap.empty() ? Deadline::never() : Deadline::at(heap.front().at));
    }
    return false;
  }

  void run() {
    std::vector<Entry> expired;
    while (takeExpired(expired)) {
      for (const Entry& entry : expired) {
        const auto op = entry.op.lock();
        if (op && !op->done()) failGenerationOf(*op);
      }
      expired.clear();
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
  if (op->done() || shared_->inherited()) return;
  Shared::Owners released;
  MutexLock lock(shared_->mutex);
  if (shared_->stopping) return;
  if (shared_->heap.size() >= shared_->prune_at) shared_->pruneLocked(released);
  const bool earliest = shared_->heap.empty() || deadline.at() < shared_->heap.front().at;
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
