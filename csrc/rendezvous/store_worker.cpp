#include "rendezvous/store_worker.h"

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "base/fork.h"

namespace torchft_ext {
namespace {

constexpr milliseconds kLongestPause{5};

StoreReply lost(std::string error) {
  return {StoreStatus::kLost, {}, std::move(error)};
}

}  // namespace

void StoreRequest::finish(StoreReply answer) {
  MutexLock lock(mutex);
  if (done) return;
  reply = std::move(answer);
  done = true;
  changed.notifyAll();
}

struct StoreWorker::Shared {
  using Request = std::shared_ptr<StoreRequest>;

  const std::string key;
  const std::shared_ptr<std::atomic<int>> stuck;
  const uint64_t generation = forkGeneration();
  std::atomic<bool> finished{false};  // written by the thread, last

  Mutex mutex;
  CondVar changed;
  std::multimap<Clock::time_point, Request> queue
      GUARDED_BY(mutex);  // by when it is due; FIFO among equals
  Request running GUARDED_BY(mutex);
  Clock::time_point running_since GUARDED_BY(mutex);
  bool stopping GUARDED_BY(mutex) = false;
  bool retired GUARDED_BY(mutex) = false;

  // The thread's own.
  StoreFactory factory;  // may keep a store
  std::unique_ptr<StoreClient> client;
  bool client_proven = false;  // it has answered before: an error may mean that it has gone stale

  Shared(std::string key_, StoreFactory factory_, std::shared_ptr<std::atomic<int>> stuck_)
      : key(std::move(key_)), stuck(std::move(stuck_)), factory(std::move(factory_)) {}

  Request next() {
    MutexLock lock(mutex);
    for (;;) {
      if (retired || (stopping && queue.empty())) return nullptr;
      if (!queue.empty() && queue.begin()->first <= Clock::now()) {
        running = queue.extract(queue.begin()).mapped();
        running_since = Clock::now();
        return running;
      }
      changed.waitUntil(mutex,
                        queue.empty() ? Deadline::never() : Deadline::at(queue.begin()->first));
    }
  }

  void requeue(const Request& request, Clock::time_point due) {
    bool refused = false;
    {
      MutexLock lock(mutex);
      refused = retired || (stopping && request->awaited);
      if (!refused) queue.emplace(due, request);
    }
    if (refused) request->finish(lost("the store at " + key + " had stopped answering"));
  }

  // False: `error` says why the client is unusable now.
  bool attempt(StoreRequest& request, StoreReply& reply, StoreRequest::Progress& progress,
               std::string& error) {
    try {
      if (!client) client = factory();
      progress = request.attempt(*client, reply);
      client_proven = true;
      return true;
    } catch (const std::exception& thrown) {
      error = thrown.what();
    } catch (...) {
      error = "an unknown exception";
    }
    return false;
  }

  void perform(const Request& request) {
    if (request->pointless()) {
      request->finish({StoreStatus::kTimedOut, {}, ""});
      return;
    }
    StoreReply reply;
    std::string error;
    auto progress = StoreRequest::Progress::kDone;
    const auto began = Clock::now();
    if (!attempt(*request, reply, progress, error)) {
      const bool repeat = std::exchange(client_proven, false);
      client.reset();
      if (repeat) return requeue(request, began);
      return request->finish(lost("the store at " + key + ": " + error));
    }
    switch (progress) {
      case StoreRequest::Progress::kDone:
        return request->finish(std::move(reply));
      case StoreRequest::Progress::kNextPart:
        return requeue(request, Clock::time_point::min());
      case StoreRequest::Progress::kLookAgain:
        request->looked.store(true, std::memory_order_release);
        // Once it is queued again another worker may have it.
        const Duration pause =
            std::exchange(request->pause, std::min<Duration>(2 * request->pause, kLongestPause));
        requeue(request, Clock::now() + pause);
    }
  }

  void run() {
    while (const Request request = next()) {
      perform(request);
      Request ended;  // maybe the last owner: destroyed without the lock
      MutexLock lock(mutex);
      ended = std::move(running);
      running = nullptr;
    }
    client.reset();
    factory = nullptr;
    bool was_retired = false;
    {
      MutexLock lock(mutex);
      was_retired = retired;
    }
    if (was_retired) stuck->fetch_sub(1);
    finished.store(true, std::memory_order_release);
  }
};

StoreWorker::StoreWorker(const std::string& key, StoreFactory factory,
                         std::shared_ptr<std::atomic<int>> stuck)
    : shared_(std::make_shared<Shared>(key, std::move(factory), std::move(stuck))),
      thread_("ft-store", [shared = shared_] { shared->run(); }) {}

StoreWorker::~StoreWorker() {
  if (abandoned_ || inForkedChild()) return;
  requestStop();
  const auto patience = finished() ? std::chrono::seconds(1) : std::chrono::seconds(0);
  if (!join(Deadline::after(patience)))
    abandon("the store at " + shared_->key + " does not answer");
}

StoreWorker::Posted StoreWorker::post(const std::shared_ptr<StoreRequest>& request,
                                      Duration after) {
  MutexLock lock(shared_->mutex);
  if (shared_->retired) return Posted::kRetired;
  if (shared_->stopping) return Posted::kStopped;
  shared_->queue.emplace(Clock::now() + after, request);
  shared_->changed.notifyAll();
  return Posted::kYes;
}

bool StoreWorker::stuck(bool caller_gave_up) {
  MutexLock lock(shared_->mutex);
  if (!shared_->running || shared_->retired || shared_->stopping) return false;
  if (Clock::now() - shared_->running_since < StoreThread::kStuckAfter) return false;
  return caller_gave_up || shared_->running->pointless();
}

StoreWorker::Requests StoreWorker::retire() {
  Requests waiting;
  {
    MutexLock lock(shared_->mutex);
    shared_->retired = true;
    for (auto& [due, request] : shared_->queue) waiting.push_back(std::move(request));
    shared_->queue.clear();
    shared_->changed.notifyAll();
    shared_->stuck->fetch_add(1);
  }
  abandon("a call to the store at " + shared_->key + " does not return");
  return waiting;
}

void StoreWorker::requestStop(NotDue not_due) {
  Requests refused;
  {
    MutexLock lock(shared_->mutex);
    shared_->stopping = true;
    const auto now = Clock::now();
    std::erase_if(shared_->queue, [&](auto& entry) {
      const bool dropped = not_due == NotDue::kDropped && entry.first > now;
      if (!entry.second->awaited && !dropped) return false;
      refused.push_back(entry.second);
      return true;
    });
    shared_->changed.notifyAll();
  }
  for (const auto& request : refused) {
    request->finish(lost("the thread for the store at " + shared_->key + " was stopped"));
  }
}

bool StoreWorker::join(Deadline deadline) {
  return abandoned_ || thread_.join(deadline);
}

void StoreWorker::abandon(const std::string& why) {
  if (!abandoned_.exchange(true)) thread_.abandon(why);
}

bool StoreWorker::stopping() {
  MutexLock lock(shared_->mutex);
  return shared_->stopping;
}

bool StoreWorker::finished() const {
  return shared_->finished.load(std::memory_order_acquire);
}
bool StoreWorker::inForkedChild() const {
  return shared_->generation != forkGeneration();
}

}  // namespace torchft_ext
