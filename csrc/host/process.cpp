#include "host/process.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/log.h"
#include "base/mutex.h"
#include "comm/callbacks.h"
#include "comm/group.h"
#include "host/host_engine.h"
#include "membership/store_thread.h"
#include "net/private_table.h"

namespace torchft_ext {
namespace {

struct Process {
  // The log's and the registry of threads take theirs under it, when a thread starts.
  Mutex mutex;
  std::shared_ptr<Watchdog> watchdog GUARDED_BY(mutex);
  std::vector<std::weak_ptr<Group>> groups GUARDED_BY(mutex);
  std::vector<ExitStep> exit_steps GUARDED_BY(mutex);
};

PerProcess<Process> per_process;
Process& process() {
  return per_process.get();
}

std::vector<std::shared_ptr<Group>> takeGroups() {
  std::vector<std::shared_ptr<Group>> groups = knownGroups();
  MutexLock lock(process().mutex);
  process().groups.clear();
  return groups;
}

constexpr Duration kIdleGoodbye = std::chrono::milliseconds(100);  // microseconds, as a rule

// Those with nothing under way first; and each has its share of what is left: one that waits for a
// peer in vain must not cost the others their goodbyes.
bool sayGoodbyes(const Watchdog& watchdog, Deadline deadline) {
  std::vector<std::shared_ptr<Group>> idle;
  std::vector<std::shared_ptr<Group>> busy;
  const auto outstanding = watchdog.outstanding();
  for (auto& group : takeGroups())
    (group->isIn(outstanding) ? busy : idle).push_back(std::move(group));
  bool all = true;
  auto left = static_cast<int64_t>(idle.size() + busy.size());
  const auto leave = [&](const std::shared_ptr<Group>& group, Duration at_least) {
    const Duration share = std::max<Duration>(deadline.remaining() / left--, at_least);
    all &= group->shutdown(deadline.orEarlier(share));
  };
  for (const auto& group : idle) leave(group, kIdleGoodbye);
  for (const auto& group : busy) leave(group, Duration::zero());
  return all;
}

std::shared_ptr<Watchdog> takeWatchdog() {
  MutexLock lock(process().mutex);
  return std::move(process().watchdog);
}

std::vector<ExitStep> exitSteps() {
  MutexLock lock(process().mutex);
  return process().exit_steps;
}

constexpr Duration kExitWithin = std::chrono::seconds(1);
// What the log may take where everything else has used up its time.
constexpr Duration kLastLines = std::chrono::milliseconds(100);

// exit() of a program without Python; where Python ends first, nothing is left to do here.
void leaveAtExit() {
  processExit(Deadline::after(kExitWithin));
}

// Those that lead into /proc are this function's own.
int countTable(const std::string& directory) {
  int count = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry->path(), gone).string();
    if (!gone && !target.starts_with("/proc/")) ++count;
  }
  return count;
}

}  // namespace

std::shared_ptr<Watchdog> sharedWatchdog() {
  MutexLock lock(process().mutex);
  // After torch's libraries were initialised, so it runs before their destructors do.
  static const bool leaves = std::atexit(&leaveAtExit) == 0;
  if (!leaves) log(LogLevel::kWarning, "no room for an exit handler: exit() says no goodbye");
  startLogThread();
  if (!process().watchdog) process().watchdog = std::make_shared<Watchdog>();
  return process().watchdog;
}

void leaveAheadAtExit() {
  static const bool ahead = std::atexit(&leaveAtExit) == 0;
  if (!ahead) log(LogLevel::kWarning, "no room for an exit handler: goodbyes may come too late");
}

void rememberGroup(const std::shared_ptr<Group>& group) {
  MutexLock lock(process().mutex);
  std::erase_if(process().groups, [](const auto& weak) { return weak.expired(); });
  process().groups.push_back(group);
}

std::vector<std::shared_ptr<Group>> knownGroups() {
  std::vector<std::shared_ptr<Group>> groups;
  MutexLock lock(process().mutex);
  for (const auto& weak : process().groups) {
    if (auto group = weak.lock()) groups.push_back(std::move(group));
  }
  return groups;
}

void addExitStep(ExitStep step) {
  MutexLock lock(process().mutex);
  std::vector<ExitStep>& steps = process().exit_steps;
  if (std::find(steps.begin(), steps.end(), step) == steps.end()) steps.push_back(step);
}

void failOutstanding(const std::string& how) {
  std::shared_ptr<Watchdog> watchdog;
  {
    MutexLock lock(process().mutex);
    watchdog = process().watchdog;
  }
  if (!watchdog) return;
  for (const auto& lifecycle : watchdog->outstanding()) {
    lifecycle->fail(lifecycle->ownFailure(FailureKind::kAborted, how));
  }
}

bool processExit(Deadline deadline) {
  const auto watchdog = takeWatchdog();
  // No group was made here: in a forked child, say, or where making it failed and that was told.
  if (!watchdog) return StoreThread::stopAll(deadline);
  // A fifth of the time is the threads', which end in microseconds.
  const Deadline goodbye =
      deadline.isNever() ? deadline : deadline.orEarlier(deadline.remaining() * 4 / 5);
  bool ended = sayGoodbyes(*watchdog, goodbye);
  for (const ExitStep step : exitSteps()) ended &= step(deadline);
  ended &= stopHostEngines(deadline);
  ended &= StoreThread::stopAll(deadline);
  ended &= watchdog->stop(deadline);
  ended &= stopCallbackThreads(deadline);
  ended &= stopLogThread(deadline.expired() ? Deadline::after(kLastLines) : deadline);
  return ended;
}

int openDescriptors() {
  int count = countTable("/proc/self/fd");
  for (const pid_t thread : threadsWithPrivateTables())
    count += countTable("/proc/self/task/" + std::to_string(thread) + "/fd");
  return count;
}

}  // namespace torchft_ext
