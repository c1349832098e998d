// A rank's part in one group: the group, the thread that works for it, and the operation it runs.
//
// Owner: Rank; one per group. Threads: the main thread alone calls in. Commands that may block are
// queued for the worker, in order; strikes and progress() act at once, so that they hit what runs.
#pragma once

#include <atomic>
#include <memory>
#include <sstream>
#include <string>

#include "base/task_thread.h"
#include "comm/group.h"
#include "cpp/programs/rank/rank_operations.h"

namespace torchft_ext {

class RankMember {
 public:
  // name: empty for the default group.
  RankMember(const std::string& name, std::shared_ptr<Engine> engine,
             std::shared_ptr<Watchdog> watchdog, std::shared_ptr<StoreThread> store);
  ~RankMember();  // aborts, ends the worker

  void command(const std::string& name, std::istringstream& words);

 private:
  bool actAtOnce(const std::string& name, std::istringstream& words);
  void timeOut(std::istringstream& words);
  void abortEvenBetween();
  void leave();
  void progress();
  void run(const std::string& name, std::istringstream& words);
  void configure(std::istringstream& words);
  void operate(bool loop, std::istringstream& words);
  static bool pause(Duration time);
  FailurePtr runOnce();
  void configureAgainAndAgain();
  FailurePtr barrier();
  bool isOwnAbort(const Failure& failure) const;
  FailurePtr lossOfGeneration() const;

  const std::string name_;
  const std::shared_ptr<StoreThread> store_;
  const std::shared_ptr<Group> group_;
  std::unique_ptr<RankOperations> operations_;  // worker thread only
  std::string prefix_;                          // worker thread only, as are the next three
  int rank_ = 0;
  int size_ = 1;
  Duration limit_{0};
  std::atomic<bool> stop_loop_{false};    // written by both threads
  std::atomic<bool> configuring_{false};  // in a loop; written by the worker
  // Of the current loop; written by the worker.
  std::atomic<uint64_t> rounds_{0};
  std::atomic<int64_t> longest_us_{0};
  uint8_t never_ = 0;
  TaskThread worker_;  // last: its tasks use all of the above
};

}  // namespace torchft_ext
