#include "membership/store_thread.h"

#include <algorithm>
#include <exception>
#include <map>

#include "base/fork.h"
#include "base/log.h"
#include "membership/store_worker.h"

namespace torchft_ext {
namespace {

using Progress = StoreRequest::Progress;

// Below the 5 ms within which a caller's giving up must show.
constexpr milliseconds kCancelInterval{4};
constexpr std::chrono::seconds kRemovalLimit{5};
constexpr milliseconds kExitPatience{200};
constexpr size_t kLooksAtOnce = 8;  // before others have their turn
// With a call of a lent client, however short the limit: an answer takes far less.
constexpr milliseconds kShortestPatience{100};

struct Registry {
  Mutex mutex;
  std::map<std::string, std::weak_ptr<StoreThread>> by_key GUARDED_BY(mutex);
  std::vector<std::shared_ptr<StoreWorker>> workers
      GUARDED_BY(mutex);  // not ended yet, not abandoned
};

PerProcess<Registry> per_process_registry;
Registry& registry() {
  return per_process_registry.get();
}

// Lets go of workers that have ended, whoever owned them.
void enlist(const std::shared_ptr<StoreWorker>& worker) {
  std::vector<std::shared_ptr<StoreWorker>> ended;  // destroyed without the lock
  MutexLock lock(registry().mutex);
  auto& workers = registry().workers;
  const auto alive = std::partition(workers.begin(), workers.end(),
                                    [](const auto& each) { return each->finished(); });
  ended.assign(workers.begin(), alive);
  workers.erase(workers.begin(), alive);
  workers.push_back(worker);
}

void strikeOff(const std::shared_ptr<StoreWorker>& worker) {
  MutexLock lock(registry().mutex);
  std::erase(registry().workers, worker);
}

// Threads whose owner has gone are about to end: exit() must not overtake them. Those that are
// still owned are stopAll()'s.
struct AwaitEndingAtExit {
  ~AwaitEndingAtExit() {
    std::vector<std::shared_ptr<StoreWorker>> workers;
    {
      MutexLock lock(registry().mutex);
      workers.swap(registry().workers);
    }
    const Deadline deadline = Deadline::after(kExitPatience);
    for (const auto& worker : workers) {
      if (!worker->stopping()) continue;
      worker->requestStop(StoreWorker::NotDue::kDropped);
      if (!worker->join(deadline)) worker->abandon("the process exits");
    }
  }
} await_ending_at_exit;  // NOLINT(clang-diagnostic-exit-time-destructors): its purpose

std::string nameKeys(const std::vector<std::string>& keys) {
  constexpr size_t kMostNamed = 4;
  std::string text;
  for (size_t i = 0; i < std::min(keys.size(), kMostNamed); ++i) {
    text += (i == 0 ? "'" : ", '") + keys[i] + "'";
  }
  if (keys.size() > kMostNamed)
    text += " and " + std::to_string(keys.size() - kMostNamed) + " more";
  return text;
}

// The caller's exit, by return or exception, tells the worker not to bother.
class GiveUpAtExit {
 public:
  explicit GiveUpAtExit(StoreRequest& request) : request_(request) {}
  ~GiveUpAtExit() { request_.given_up.store(true, std::memory_order_release); }
  GiveUpAtExit(const GiveUpAtExit&) = delete;
  GiveUpAtExit& operator=(const GiveUpAtExit&) = delete;

 private:
  StoreRequest& request_;
};

std::string orKey(std::string identity, const std::string& key) {
  if (identity.empty()) return key;
  return identity;
}

// Empty: the key is missing.
std::string lookAt(StoreClient& client, const std::string& key) {
  auto values = client.getAll({key});
  return values ? std::move(values->front()) : std::string();
}

// False: not answered by `until`.
bool takeReply(StoreRequest& request, Deadline until, StoreReply& reply) {
  MutexLock lock(request.mutex);
  while (!request.done && !until.expired()) request.changed.waitUntil(request.mutex, until);
  if (request.done) reply = std::move(request.reply);
  return request.done;
}

}  // namespace

std::shared_ptr<StoreThread> StoreThread::forServer(const std::string& key, StoreFactory factory,
                                                    const LentClient& lent, std::string identity) {
  std::shared_ptr<StoreThread> existing;
  {
    MutexLock lock(registry().mutex);
    const auto found = registry().by_key.find(key);
    if (found != registry().by_key.end()) existing = found->second.lock();
  }
  if (existing) {
    existing->worker()->lend(lent);
    return existing;
  }
  auto made = std::make_shared<StoreThread>(
      key, std::move(factory), lent, std::move(identity));  // starts a thread: without the lock
  MutexLock lock(registry().mutex);
  std::erase_if(registry().by_key, [](const auto& entry) { return entry.second.expired(); });
  auto& slot = registry().by_key[key];
  existing = slot.lock();
  if (existing) return existing;  // another caller was faster
  slot = made;
  return made;
}

StoreThread::StoreThread(std::string key, StoreFactory factory,
                         std::shared_ptr<std::atomic<int>> stuck,
                         std::shared_ptr<StoreWorker> worker)
    : key_(std::move(key)),
      identity_(key_),
      factory_(std::move(factory)),
      fork_count_(forkCount()),
      stuck_(std::move(stuck)),
      worker_(std::move(worker)) {}

std::shared_ptr<StoreThread> StoreThread::onCaller(std::string key, StoreFactory factory) {
  auto worker = StoreWorker::onCaller(key, factory);
  return std::shared_ptr<StoreThread>(
      new StoreThread(std::move(key), std::move(factory), nullptr, std::move(worker)));
}

StoreThread::StoreThread(std::string key, StoreFactory factory, const LentClient& lent,
                         std::string identity)
    : key_(std::move(key)),
      identity_(orKey(std::move(identity), key_)),
      factory_(std::move(factory)),
      fork_count_(forkCount()),
      stuck_(std::make_shared<std::atomic<int>>(0)),
      late_(std::make_shared<LateWrites>()),
      worker_(std::make_shared<StoreWorker>(key_, factory_, StoreWorker::Common{stuck_, late_})) {
  worker()->lend(lent);
  enlist(worker());
}

StoreThread::~StoreThread() {
  if (!inForkedChild()) worker()->requestStop();
}

StoreReply StoreThread::set(const std::string& key, const std::string& value, Deadline deadline,
                            const Cancelled& cancelled) {
  return setAll({{key, value}}, deadline, cancelled);
}

StoreReply StoreThread::setAll(std::vector<std::pair<std::string, std::string>> pairs,
                               Deadline deadline, const Cancelled& cancelled) {
  if (pairs.empty()) return {};
  std::vector<std::string> keys;
  keys.reserve(pairs.size());
  for (const auto& [key, value] : pairs) keys.push_back(key);
  auto attempt = [pairs = std::move(pairs), next = size_t{0}](StoreClient& client,
                                                              StoreReply&) mutable {
    client.set(pairs[next].first, pairs[next].second);
    return ++next == pairs.size() ? Progress::kDone : Progress::kNextPart;
  };
  return submit(std::make_shared<StoreRequest>(std::move(attempt), deadline, nameKeys(keys)),
                cancelled);
}

StoreReply StoreThread::awaitAll(const std::vector<std::string>& keys, Deadline deadline,
                                 const Cancelled& cancelled) {
  return awaitWhere(
      keys, [](const auto&) { return true; }, deadline, cancelled);
}

StoreReply StoreThread::awaitWhere(const std::vector<std::string>& keys, Acceptable acceptable,
                                   Deadline deadline, const Cancelled& cancelled, Deadline enough,
                                   Duration pause) {
  auto attempt = [keys, acceptable = std::move(acceptable)](StoreClient& client,
                                                            StoreReply& reply) {
    auto values = client.getAll(keys);
    if (!values || !acceptable(*values)) return Progress::kLookAgain;
    reply.values = std::move(*values);
    return Progress::kDone;
  };
  auto request = std::make_shared<StoreRequest>(std::move(attempt), deadline, nameKeys(keys));
  request->pause = pause;
  return submit(request, cancelled, enough);
}

StoreReply StoreThread::getAll(const std::vector<std::string>& keys, Deadline deadline,
                               const Cancelled& cancelled) {
  auto attempt = [keys](StoreClient& client, StoreReply& reply) {
    reply.values = client.getAll(keys).value_or(std::vector<std::string>{});
    return Progress::kDone;
  };
  return submit(std::make_shared<StoreRequest>(std::move(attempt), deadline, nameKeys(keys)),
                cancelled);
}

StoreReply StoreThread::getEach(const std::vector<std::string>& keys, Deadline deadline,
                                const Cancelled& cancelled) {
  auto attempt = [keys](StoreClient& client, StoreReply& reply) {
    reply.values.clear();
    for (const std::string& key : keys) reply.values.push_back(lookAt(client, key));
    return Progress::kDone;
  };
  return submit(std::make_shared<StoreRequest>(std::move(attempt), deadline, nameKeys(keys)),
                cancelled);
}

void StoreThread::editLater(const std::string& key, Edit edit, std::vector<std::string> beside,
                            Duration after) {
  auto attempt = [key, edit = std::move(edit), beside = std::move(beside),
                  others = std::vector<std::string>()](StoreClient& client, StoreReply&) mutable {
    const size_t until = std::min(others.size() + kLooksAtOnce, beside.size());
    while (others.size() < until) others.push_back(lookAt(client, beside[others.size()]));
    if (others.size() < beside.size()) return Progress::kNextPart;
    const auto wanted = edit(lookAt(client, key), others);
    if (!wanted) return Progress::kDone;
    if (wanted->empty()) {
      client.remove(key);
    } else {
      client.set(key, *wanted);
    }
    return Progress::kDone;
  };
  post(std::make_shared<StoreRequest>(std::move(attempt), Deadline::after(after + kRemovalLimit),
                                      "edit", false),
       after);
}

void StoreThread::removeLater(std::vector<std::string> keys) {
  if (keys.empty()) return;
  auto attempt = [keys = std::move(keys), next = size_t{0}](StoreClient& client,
                                                            StoreReply&) mutable {
    client.remove(keys[next]);
    return ++next == keys.size() ? Progress::kDone : Progress::kNextPart;
  };
  post(std::make_shared<StoreRequest>(std::move(attempt), Deadline::after(kRemovalLimit), "removal",
                                      false));
}

bool StoreThread::stopAll(Deadline deadline) {
  std::vector<std::shared_ptr<StoreWorker>> workers;
  {
    MutexLock lock(registry().mutex);
    workers.swap(registry().workers);
    registry().by_key.clear();
  }
  for (const auto& worker : workers) worker->requestStop(StoreWorker::NotDue::kDropped);
  bool all = true;
  for (const auto& worker : workers) {
    if (worker->join(deadline)) continue;
    all = false;
    worker->abandon("a store call had not returned when the process ended its threads");
  }
  return all;
}

std::shared_ptr<StoreWorker> StoreThread::worker() {
  MutexLock lock(mutex_);
  return worker_;
}

std::vector<StoreLimit::Patience> StoreThread::patience() {
  MutexLock lock(mutex_);
  return {limits_.begin(), limits_.end()};
}

StoreLimit::StoreLimit(std::shared_ptr<StoreThread> store, Duration limit)
    : store_(std::move(store)) {
  const Patience patience{Clock::now(), std::max<Duration>(limit / 2, kShortestPatience)};
  MutexLock lock(store_->mutex_);
  place_ = store_->limits_.insert(store_->limits_.end(), patience);
}

StoreLimit::~StoreLimit() {
  if (store_->inForkedChild()) return;
  MutexLock lock(store_->mutex_);
  store_->limits_.erase(place_);
}

bool StoreThread::inForkedChild() const {
  return fork_count_ != forkCount();
}

bool StoreThread::post(const std::shared_ptr<StoreRequest>& request, Duration after) {
  if (inForkedChild()) return false;
  for (;;) {
    switch (worker()->post(request, after)) {
      case StoreWorker::Posted::kYes:
        return true;
      case StoreWorker::Posted::kStopped:
        return false;
      case StoreWorker::Posted::kRetired:
        break;  // its successor stands before it is retired: ask for that one
    }
  }
}

StoreReply StoreThread::submit(const std::shared_ptr<StoreRequest>& request,
                               const Cancelled& cancelled, Deadline enough) {
  if (cancelled && cancelled()) return {StoreStatus::kCancelled, {}, ""};
  if (!post(request)) {
    return {StoreStatus::kLost, {}, "the thread for the store at " + key_ + " was stopped"};
  }
  const GiveUpAtExit give_up(*request);
  StoreReply reply;
  while (!takeReply(*request, request->deadline.orEarlier(Duration(kCancelInterval)), reply)) {
    const bool looked = enough.expired() && request->looked.load(std::memory_order_acquire);
    if (looked || request->deadline.expired()) {
      reply.status = StoreStatus::kTimedOut;
      break;
    }
    if (cancelled && cancelled()) {
      reply.status = StoreStatus::kCancelled;
      break;
    }
    replaceIfStuck(false);
  }
  if (reply.status == StoreStatus::kTimedOut) replaceIfStuck(true);
  if (reply.status == StoreStatus::kTimedOut || reply.status == StoreStatus::kCancelled) {
    reply.error = "no answer from the store at " + key_ + " about " + request->subject;
  }
  return reply;
}

void StoreThread::replaceIfStuck(bool caller_gave_up) {
  const auto old = worker();
  if (!stuck_ || !old->stuck(caller_gave_up, patience()) || stuck_->load() >= kMostStuck) return;
  std::shared_ptr<StoreWorker> fresh;
  try {
    fresh = std::make_shared<StoreWorker>(key_, factory_, StoreWorker::Common{stuck_, late_});
  } catch (const std::exception& error) {
    log(LogLevel::kError, std::string("no new thread for the store: ") + error.what());
    return;
  }
  enlist(fresh);
  bool first = false;
  {
    MutexLock lock(mutex_);
    first = worker_ == old;
    if (first) worker_ = fresh;
  }
  if (!first) return fresh->requestStop();  // another caller was faster
  strikeOff(old);
  for (const auto& request : old->retire()) {
    if (fresh->post(request) != StoreWorker::Posted::kYes) post(request);
  }
}

}  // namespace torchft_ext
