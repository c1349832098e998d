#include "nccl/comm_reaper.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <system_error>
#include <utility>

#include "base/fork.h"
#include "base/log.h"
#include "nccl/reap_batch.h"

namespace torchft_ext {
namespace {

constexpr Duration kGraphAtStop = milliseconds(200);
constexpr Duration kLookForReturned = std::chrono::seconds(1);
constexpr Duration kHelperEndsWithin = std::chrono::seconds(10);  // its last lines

struct Request {
  CommReaper::Comms comms;
  ReapBatch::How how = ReapBatch::How::kAbort;
  Deadline retire_by = Deadline::never();
};

struct Helper {
  std::shared_ptr<ReapBatch> batch;
  std::shared_ptr<std::atomic<bool>> done;  // set by the helper, under the reaper's mutex
  OwnedThread thread;
  bool given_up = false;  // waits for a graph's end: no longer looked at

  Deadline overdue() const {
    // It ends its own waits at the batch's deadline: a second more shows that it is in NCCL.
    return Deadline::at(batch->deadline().at() + std::chrono::seconds(1));
  }
  // A call into NCCL did not return.
  bool leftAsItIs() const {
    const auto& comms = batch->comms();
    return std::any_of(comms.begin(), comms.end(),
                       [](const auto& comm) { return !comm->gone() && comm->gate().occupied(); });
  }
  bool waitsForGraph() const {
    const auto& comms = batch->comms();
    return std::any_of(comms.begin(), comms.end(),
                       [](const auto& comm) { return comm->captured() && !comm->gone(); });
  }
};

}  // namespace

struct CommReaper::Shared : std::enable_shared_from_this<CommReaper::Shared> {
  Shared(std::function<void()> cut, Duration batch_limit)
      : on_cut(std::move(cut)), limit(batch_limit) {}

  const std::function<void()> on_cut;
  const Duration limit;
  const uint64_t fork_count = forkCount();
  Mutex mutex;
  CondVar changed;
  std::vector<Request> requests GUARDED_BY(mutex);
  bool finished GUARDED_BY(mutex) = false;  // some helper has
  bool stopping GUARDED_BY(mutex) = false;
  Deadline stop_by GUARDED_BY(mutex) = Deadline::never();
  std::vector<std::weak_ptr<DeviceComm>> handed_over GUARDED_BY(mutex);
  std::vector<std::shared_ptr<DeviceComm>> kept GUARDED_BY(mutex);  // cannot be freed
  ReaperCounts counts GUARDED_BY(mutex);
  std::vector<Helper> helpers;  // the reaper thread's, as the next
  Comms inside;                 // left as they are, since a caller does not come back

  bool inherited() const { return fork_count != forkCount(); }
  void submit(Request request);
  void startReturned();
  void run();
  std::vector<Request> await(Deadline deadline);
  void collect(bool give_up_all);
  void account(const ReapBatch& batch);
  void start(Comms comms, ReapBatch::How how, Deadline retire_by);
  bool endingOn(c10::Device device, Comms& seen) const REQUIRES(mutex);
  void startAll(std::vector<Request> requests);
  Deadline nextLimit() const;
};

void CommReaper::Shared::submit(Request request) {
  for (const auto& comm : request.comms) comm->close();
  if (request.comms.empty() || inherited()) return;
  MutexLock lock(mutex);
  std::erase_if(handed_over, [](const auto& weak) { return weak.expired(); });
  std::erase_if(kept, [](const auto& comm) { return comm->gone(); });
  handed_over.insert(handed_over.end(), request.comms.begin(), request.comms.end());
  if (stopping) {
    kept.insert(kept.end(), request.comms.begin(), request.comms.end());
    return;
  }
  if (request.how == ReapBatch::How::kAbort)
    for (const auto& comm : request.comms) comm->keepControl();
  requests.push_back(std::move(request));
  changed.notifyAll();
}

// Those whose callers have come back after all. Not blocking ones: they were told to stop in a
// group that a thread which has ended has left open.
void CommReaper::Shared::startReturned() {
  Comms returned;
  std::erase_if(inside, [&](const auto& comm) {
    if (comm->gate().occupied()) return false;
    returned.push_back(comm);
    return true;
  });
  {
    MutexLock lock(mutex);
    for (const auto& comm : returned) std::erase(kept, comm);
  }
  for (auto& comm : returned) start({std::move(comm)}, ReapBatch::How::kAbort, Deadline::never());
}

// What has been handed over, or nothing: a helper is through, one is overdue, or it is the end.
std::vector<Request> CommReaper::Shared::await(Deadline deadline) {
  MutexLock lock(mutex);
  while (requests.empty() && !finished && !stopping && !deadline.expired())
    changed.waitUntil(mutex, deadline);
  finished = false;
  return std::exchange(requests, {});
}

Deadline CommReaper::Shared::nextLimit() const {
  Deadline next = Deadline::never();
  for (const Helper& helper : helpers)
    if (!helper.given_up) next = next.orEarlier(helper.overdue());
  return inside.empty() ? next : next.orEarlier(kLookForReturned);
}

void CommReaper::Shared::run() {
  while (true) {
    startAll(await(nextLimit()));
    collect(false);
    startReturned();
    MutexLock lock(mutex);
    if (stopping && requests.empty()) break;
  }
  Deadline by = Deadline::never();
  {
    MutexLock lock(mutex);
    by = stop_by;
  }
  for (Helper& helper : helpers)
    helper.thread.join(helper.waitsForGraph() ? by.orEarlier(kGraphAtStop) : by);
  collect(true);
}

void CommReaper::Shared::startAll(std::vector<Request> requests_taken) {
  Comms together;
  for (Request& request : requests_taken) {
    const bool retires = request.how == ReapBatch::How::kRetire;
    Comms retired;
    for (auto& comm : request.comms) {
      // A caller that waits for peers in a blocking communicator leaves when that one is aborted;
      // and one whose caller does not leave must hold up no other, nor may one whose registered
      // memory is given back, for which NCCL may ask peers.
      const bool asks = comm->blocking() || comm->memory().holdsAny();
      if (comm->captured() || (asks && (retires || comm->gate().occupied()))) {
        start({std::move(comm)}, request.how, request.retire_by);
      } else {
        (retires ? retired : together).push_back(std::move(comm));
      }
    }
    if (!retired.empty()) start(std::move(retired), request.how, request.retire_by);
  }
  if (!together.empty()) start(std::move(together), ReapBatch::How::kAbort, Deadline::never());
}

void CommReaper::Shared::start(Comms comms, ReapBatch::How how, Deadline retire_by) {
  auto batch = std::make_shared<ReapBatch>(std::move(comms), how, retire_by, limit, on_cut);
  auto done = std::make_shared<std::atomic<bool>>(false);
  // A helper that is left to itself may outlive the reaper, not what it uses.
  const auto body = [shared = shared_from_this(), batch, done] {
    try {
      batch->run();
    } catch (const std::exception& error) {
      log(LogLevel::kError,
          std::string("ending NCCL communicators was cut short: ") + error.what());
      batch->giveUp();
    }
    MutexLock lock(shared->mutex);
    done->store(true);
    shared->finished = true;
    shared->changed.notifyAll();
  };
  try {
    helpers.push_back({batch, done, OwnedThread("ft-nccl-abort", body)});
  } catch (const std::system_error& error) {
    const std::string why =
        std::string("no thread to abort NCCL communicators on (") + error.what() + "): ";
    if (batch->mayTakeLong()) {
      log(LogLevel::kError, why + "they are left as they are");
      batch->giveUp();
    } else {
      log(LogLevel::kError, why + "others wait until these are aborted");
      body();
    }
    account(*batch);
  }
}

void CommReaper::Shared::collect(bool give_up_all) {
  std::vector<Helper> waiting;
  for (Helper& helper : helpers) {
    const bool overdue = helper.overdue().expired() || give_up_all;
    if (helper.done->load()) {
      helper.thread.join(Deadline::after(kHelperEndsWithin));
      if (helper.leftAsItIs()) {
        for (const auto& comm : helper.batch->comms())
          if (!comm->gone() && !comm->blocking() && comm->gate().occupied()) inside.push_back(comm);
        MutexLock lock(mutex);
        ++counts.stuck;
      }
    } else if (overdue && helper.waitsForGraph()) {
      if (!helper.given_up) helper.batch->giveUp();
      helper.given_up = true;
      if (!give_up_all) {
        waiting.push_back(std::move(helper));
        continue;
      }
      helper.thread.abandon("a CUDA graph that captured it is alive: " +
                            helper.batch->comms().front()->setup().name);
    } else if (overdue) {
      helper.batch->giveUp();
      helper.thread.abandon(
          "NCCL did not finish aborting " + std::to_string(helper.batch->comms().size()) +
          " communicators, among them " + helper.batch->comms().front()->setup().name);
      MutexLock lock(mutex);
      ++counts.stuck;
    } else {
      waiting.push_back(std::move(helper));
      continue;
    }
    account(*helper.batch);
  }
  helpers.swap(waiting);
}

void CommReaper::Shared::account(const ReapBatch& batch) {
  MutexLock lock(mutex);
  for (const auto& comm : batch.comms()) {
    if (comm->gone()) {
      ++(batch.how() == ReapBatch::How::kRetire ? counts.retired : counts.aborted);
    } else {
      kept.push_back(comm);
    }
  }
  changed.notifyAll();
}

// seen: what it looked at, to be let go of without the lock.
bool CommReaper::Shared::endingOn(c10::Device device, Comms& seen) const {
  for (const auto& weak : handed_over) {
    const auto comm = weak.lock();
    if (!comm) continue;
    seen.push_back(comm);
    const bool ending = !comm->gone() && !comm->captured() && comm->setup().device == device;
    if (ending && std::find(kept.begin(), kept.end(), comm) == kept.end()) return true;
  }
  return false;
}

CommReaper::CommReaper(std::function<void()> on_cut, Duration limit)
    : shared_(std::make_shared<Shared>(std::move(on_cut), limit)),
      thread_("ft-nccl-reaper", [shared = shared_] { shared->run(); }) {}

CommReaper::~CommReaper() {
  stop(Deadline::after(std::chrono::seconds(1)));
}

void CommReaper::abort(Comms comms) {
  shared_->submit({std::move(comms), ReapBatch::How::kAbort, Deadline::never()});
}

void CommReaper::retire(Comms comms, Deadline deadline) {
  shared_->submit({std::move(comms), ReapBatch::How::kRetire, deadline});
}

bool CommReaper::awaitEnded(c10::Device device, Deadline deadline) const {
  if (shared_->inherited()) return true;
  Comms seen;
  MutexLock lock(shared_->mutex);
  while (shared_->endingOn(device, seen)) {
    if (deadline.expired()) return false;
    shared_->changed.waitUntil(shared_->mutex, deadline);
  }
  return true;
}

ReaperCounts CommReaper::counts() const {
  MutexLock lock(shared_->mutex);
  ReaperCounts counts = shared_->counts;
  for (const auto& weak : shared_->handed_over) {
    const auto comm = weak.lock();
    if (!comm || comm->gone()) continue;
    ++counts.live;
    if (comm->captured() && comm->cut()) ++counts.held_by_graphs;
  }
  return counts;
}

bool CommReaper::stop(Deadline deadline) {
  if (shared_->inherited()) return true;
  {
    MutexLock lock(shared_->mutex);
    shared_->stopping = true;
    shared_->stop_by = deadline;
    shared_->changed.notifyAll();
  }
  // It gives its helpers up at the deadline itself.
  const bool ended =
      thread_.join(deadline.isNever() ? deadline : Deadline::at(deadline.at() + milliseconds(200)));
  MutexLock lock(shared_->mutex);
  return ended && shared_->counts.stuck == 0;
}

}  // namespace torchft_ext
