// What a generation asks and answers about long waits. It asks the members that its operations wait
// for (wait_inquiry.h), and it tells each member that asks what has been issued here.
//
// States (loop thread):
// clang-format off
//   new     questions of members are answered
//   asking  from begin() to end(), while the generation is up: it also asks
//   ended   nothing is asked any more; a report that comes is dropped
// clang-format on
//
// Nothing is ended here, and no failure is made here: the owner judges a member that sends
// nonsense.
//
// Owner: HostGeneration; tasks on the loop hold it weakly. Threads: loop only, but for waitedFor().
// It never blocks.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/lifecycle.h"
#include "host/collectives.h"
#include "host/generation_connections.h"
#include "host/messages.h"
#include "host/wait_inquiry.h"
#include "membership/records.h"
#include "net/event_loop.h"

namespace torchft_ext {

class LongWaits : public std::enable_shared_from_this<LongWaits> {
 public:
  // To the loop, from any thread. False: the loop has gone.
  using Post = std::function<bool(EventLoop::Task)>;
  // Where operations wait. All of it outlives end().
  struct Queues {
    const Collectives* collectives = nullptr;
    const Messages* messages = nullptr;
    std::function<bool(int rank)> has_left{};  // that member has said goodbye
  };

  // The roster and the connections are the owner's, and outlive this object.
  LongWaits(EventLoop& loop, std::shared_ptr<Lifecycle> lifecycle, const Roster& roster,
            const GenerationConnections& connections);

  void begin(Queues queues, const Post& post);
  void end();
  // From a member that waits: `place` of its collective, or kNoPlace.
  void onQuestion(int rank, uint64_t place);
  // False: this payload is no report.
  bool onReport(int rank, const std::string& payload);
  // How long operations have waited for each rank, by rank. Any thread.
  std::vector<Duration> waitedFor() const { return times_->all(); }

 private:
  int size() const { return lifecycle_->identity().size; }
  WaitInquiry::Callbacks inquiryCallbacks();
  void onWaits(const Lifecycle::Operations& operations);
  std::optional<WaitInquiry::Wait> waitOf(const std::shared_ptr<OpState>& op) const;

  EventLoop& loop_;
  const std::shared_ptr<Lifecycle> lifecycle_;
  const Roster& roster_;
  const GenerationConnections& connections_;
  const std::shared_ptr<WaitTimes> times_;
  std::vector<Clock::time_point> told_at_;  // by rank: when that member was last told
  Queues queues_;
  std::unique_ptr<WaitInquiry> inquiry_;  // while it asks
};

}  // namespace torchft_ext
