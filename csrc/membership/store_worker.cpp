#include "membership/store_worker.h"

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

// Why a client is unusable now.
struct Trouble {
  std::string error;
  bool starved = false;  // of this process
};

}  // namespace

void StoreRequest::noteLook() {
  if (instead_of) return instead_of->noteLook();
  looked.store(true, std::memory_order_release);
}

void StoreRequest::finish(StoreReply answer) {
  if (instead_of) return instead_of->finish(std::move(answer));
  MutexLock lock(mutex);
  if (done) return;
  reply = std::move(answer);
  done = true;
  changed.notifyAll();
}

struct StoreWorker::Shared {
  using Request = std::shared_ptr<StoreRequest>;
  class FollowedClient;

  const std::string key;
  const Common common;
  const uint64_t fork_count = forkCount();
  std::atomic<bool> finished{false};  // written by the thread, last

  Mutex mutex;
  CondVar changed;
  std::multimap<Clock::time_point, Request> queue
      GUARDED_BY(mutex);  // by when it is due; FIFO among equals
  Request running GUARDED_BY(mutex);
  Clock::time_point running_since GUARDED_BY(mutex);
  bool stopping GUARDED_BY(mutex) = false;
  bool retired GUARDED_BY(mutex) = false;
  LentClient lent GUARDED_BY(mutex);         // empty: nobody lends, or no more
  bool borrowing GUARDED_BY(mutex) = false;  // the running request is in a call of a lent client
  // The write that is in a call, and its number once that was given up; mutex, then LateWrites'
  // own.
  std::optional<LateWrites::Write> writing GUARDED_BY(mutex);
  uint64_t given_up GUARDED_BY(mutex) = 0;

  // The thread's own.
  StoreFactory factory;  // may keep a store
  std::unique_ptr<StoreClient> client;
  bool client_proven = false;  // it has answered before: an error may mean that it has gone stale

  Shared(std::string key_, StoreFactory factory_, Common common_)
      : key(std::move(key_)), common(std::move(common_)), factory(std::move(factory_)) {}

  // Throws where nobody wants it from this thread any more. What nobody waits for has just looked
  // at what stands there.
  void beginWrite(LateWrites::Write write) {
    MutexLock lock(mutex);
    if (retired && running && (running->made_again || (running->awaited && running->pointless())))
      throw StoreError("it was given up");
    if (retired) {
      given_up = common.late->giveUp(write);
    } else {
      common.late->note(write);
    }
    writing = std::move(write);
  }

  // The number of a write that was given up meanwhile; else 0.
  uint64_t endWrite() {
    MutexLock lock(mutex);
    writing.reset();
    return std::exchange(given_up, 0);
  }

  void noteFound(const std::string& found_at, const std::string& value) {
    MutexLock lock(mutex);
    if (!retired) common.late->note({found_at, value});
  }

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
    if (refused && !request->made_again)
      request->finish(lost("the store at " + key + " had stopped answering"));
  }

  // Null: none is lent, or it has gone.
  std::shared_ptr<StoreClient> borrow(const StoreRequest& request) {
    StoreLoan loan;
    {
      MutexLock lock(mutex);
      loan = lent.loan;
    }
    if (!loan) return nullptr;
    auto borrowed = request.lent ? request.lent : loan();
    if (!borrowed) giveBack(/*failed=*/true);
    MutexLock lock(mutex);
    borrowing = borrowed != nullptr;
    return borrowed;
  }

  // A lent client that has failed, or gone, is not asked again.
  void giveBack(bool failed) {
    LentClient ended;  // without the lock
    MutexLock lock(mutex);
    borrowing = false;
    if (failed) std::swap(lent, ended);
  }

  bool attempt(StoreRequest& request, StoreReply& reply, StoreRequest::Progress& progress,
               Trouble& trouble);

  void perform(const Request& request) {
    if (request->pointless()) {
      request->finish({StoreStatus::kTimedOut, {}, ""});
      return;
    }
    StoreReply reply;
    Trouble trouble;
    auto progress = StoreRequest::Progress::kDone;
    const auto began = Clock::now();
    if (!attempt(*request, reply, progress, trouble)) {
      giveBack(/*failed=*/true);
      const bool repeat = std::exchange(client_proven, false);
      client.reset();
      if (repeat) return requeue(request, began);
      if (request->made_again) return;
      StoreReply answer = lost("the store at " + key + ": " + trouble.error);
      if (trouble.starved) answer.status = StoreStatus::kStarved;
      return request->finish(std::move(answer));
    }
    switch (progress) {
      case StoreRequest::Progress::kDone:
        return request->finish(std::move(reply));
      case StoreRequest::Progress::kNextPart:
        return requeue(request, Clock::time_point::min());
      case StoreRequest::Progress::kLookAgain:
        request->noteLook();
        // Once it is queued again another worker may have it.
        const Duration pause =
            std::exchange(request->pause, std::min<Duration>(2 * request->pause, kLongestPause));
        requeue(request, Clock::now() + pause);
    }
  }

  // Those that are posted on the way included.
  void runDue() {
    for (;;) {
      Request request;
      {
        MutexLock lock(mutex);
        if (queue.empty() || queue.begin()->first > Clock::now()) return;
        request = queue.extract(queue.begin()).mapped();
      }
      perform(request);
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
    giveBack(/*failed=*/true);
    bool was_retired = false;
    {
      MutexLock lock(mutex);
      was_retired = retired;
    }
    if (was_retired) common.stuck->fetch_sub(1);
    finished.store(true, std::memory_order_release);
  }
};

// A client that tells of what it writes and finds, and undoes what it has written too late.
class StoreWorker::Shared::FollowedClient : public StoreClient {
 public:
  FollowedClient(Shared& worker, StoreClient& client) : worker_(worker), client_(client) {}

  void set(const std::string& key, const std::string& value) override { write({key, value}); }
  void remove(const std::string& key) override { write({key, ""}); }
  std::optional<std::vector<std::string>> getAll(const std::vector<std::string>& keys) override {
    auto values = client_.getAll(keys);
    if (keys.size() == 1) worker_.noteFound(keys[0], values ? values->front() : "");
    return values;
  }

 private:
  void put(const LateWrites::Write& write) {
    write.value.empty() ? client_.remove(write.key) : client_.set(write.key, write.value);
  }

  void write(const LateWrites::Write& write) {
    worker_.beginWrite(write);
    try {
      put(write);
    } catch (...) {
      forget(worker_.endWrite());
      throw;
    }
    if (const uint64_t late = worker_.endWrite()) undo(write, late);
  }

  // A set does not wait for the server: once a look behind it is answered, it has been done.
  void undo(const LateWrites::Write& write, uint64_t late) {
    std::string found;
    try {
      const auto values = client_.getAll({write.key});
      if (values) found = values->front();
    } catch (...) {
      forget(late);
      throw;
    }
    const auto since = worker_.common.late->returned(late);
    if (since && *since != found && found == write.value) put({write.key, *since});
  }

  void forget(uint64_t late) { worker_.common.late->returned(late); }

  Shared& worker_;
  StoreClient& client_;
};

bool StoreWorker::Shared::attempt(StoreRequest& request, StoreReply& reply,
                                  StoreRequest::Progress& progress, Trouble& trouble) {
  if (!request.begun) request.begun = request.attempt;
  try {
    const auto borrowed = client ? nullptr : borrow(request);
    if (borrowed) client_proven = true;
    if (!client && !borrowed) client = factory();
    FollowedClient followed(*this, borrowed ? *borrowed : *client);
    progress = request.begun(followed, reply);
    client_proven = true;
    giveBack(/*failed=*/false);
    return true;
  } catch (const StoreShortage& thrown) {
    trouble = {thrown.what(), true};
  } catch (const std::exception& thrown) {
    trouble.error = thrown.what();
  } catch (...) {
    trouble.error = "an unknown exception";
  }
  return false;
}

StoreWorker::StoreWorker(const std::string& key, StoreFactory factory, const Common& common)
    : shared_(std::make_shared<Shared>(key, std::move(factory), common)),
      thread_("ft-store", [shared = shared_] { shared->run(); }) {}

StoreWorker::StoreWorker(std::shared_ptr<Shared> shared)
    : shared_(std::move(shared)), on_caller_(true) {}

std::shared_ptr<StoreWorker> StoreWorker::onCaller(const std::string& key, StoreFactory factory) {
  return std::shared_ptr<StoreWorker>(
      new StoreWorker(std::make_shared<Shared>(key, std::move(factory), Common())));
}

StoreWorker::~StoreWorker() {
  if (on_caller_ || abandoned_ || inForkedChild()) return;
  requestStop();
  const auto patience = finished() ? std::chrono::seconds(1) : std::chrono::seconds(0);
  if (!join(Deadline::after(patience)))
    abandon("the store at " + shared_->key + " does not answer");
}

void StoreWorker::lend(const LentClient& lent) {
  if (!lent.loan) return;
  LentClient before;
  {
    MutexLock lock(shared_->mutex);
    before = shared_->lent;
  }
  if (before.loan && before.loan()) return;
  MutexLock lock(shared_->mutex);
  shared_->lent = lent;
}

StoreWorker::Posted StoreWorker::post(const std::shared_ptr<StoreRequest>& request,
                                      Duration after) {
  StoreLoan loan;
  {
    MutexLock lock(shared_->mutex);
    loan = shared_->lent.loan;
  }
  // What is due at once, removals of a group that ends among it, is done though the lender goes.
  // What comes later does not keep a store alive, which may be the server itself.
  if (loan && after == Duration::zero()) request->lent = loan();
  {
    MutexLock lock(shared_->mutex);
    if (shared_->retired) return Posted::kRetired;
    if (shared_->stopping) return Posted::kStopped;
    shared_->queue.emplace(Clock::now() + after, request);
    shared_->changed.notifyAll();
  }
  if (on_caller_) shared_->runDue();
  return Posted::kYes;
}

bool StoreWorker::stuck(bool caller_gave_up, const std::vector<StoreLimit::Patience>& others) {
  MutexLock lock(shared_->mutex);
  if (!shared_->running || shared_->retired || shared_->stopping) return false;
  const Duration in_call = Clock::now() - shared_->running_since;
  if (shared_->borrowing) {
    return in_call >= shared_->lent.patience ||
           std::any_of(others.begin(), others.end(),
                       [began = shared_->running_since](const StoreLimit::Patience& patience) {
                         return patience.isOver(began);
                       });
  }
  if (in_call < StoreThread::kStuckAfter) return false;
  return caller_gave_up || shared_->running->pointless();
}

StoreWorker::Requests StoreWorker::retire() {
  Requests waiting;
  {
    MutexLock lock(shared_->mutex);
    shared_->retired = true;
    if (shared_->writing) shared_->given_up = shared_->common.late->giveUp(*shared_->writing);
    if (shared_->borrowing && shared_->running && !shared_->running->pointless()) {
      shared_->running->made_again = true;
      waiting.push_back(std::make_shared<StoreRequest>(shared_->running));
    }
    for (auto& [due, request] : shared_->queue) waiting.push_back(std::move(request));
    shared_->queue.clear();
    shared_->changed.notifyAll();
    shared_->common.stuck->fetch_add(1);
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
  return shared_->fork_count != forkCount();
}

}  // namespace torchft_ext
