// Runs schedules over the collective channels, one after the other, in issue order.
//
// Loop thread only. Owner: HostGeneration. Frames that arrive ahead of their operation wait
// in the connection (it is not read). A frame of another operation than the one that is due (seq,
// signature, step or length differ) fails the generation with kMismatch. cancelAll() leaves every
// buffer untouched from then on and completes nothing: it returns what was pending.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "comm/op_state.h"
#include "host/collectives.h"
#include "host/connection.h"
#include "host/schedule.h"

namespace torchft_ext {

class ScheduleRunner : public Collectives {
 public:
  struct Callbacks {
    std::function<void(Failure)> failed;  // a mismatch; the runner does nothing more
    std::function<void(int peer, const std::string& why, bool clean)> broken;  // a connection's end
    std::function<void(int peer, const FrameHeader& goodbye)> left;
    std::function<void()> nudged;     // by a peer, of what runs in shared memory
    std::function<void()> exchanged;  // done() has grown; from within a call, the runner's included
  };

  // connections: by rank, null at own rank; borrowed, they outlive the runner.
  ScheduleRunner(EventLoop& loop, int rank, int size, std::vector<Connection*> connections,
                 ScheduleTuning tuning, Callbacks callbacks);
  ~ScheduleRunner() override;

  void add(std::shared_ptr<OpState> state, Operation operation) override;
  bool idle() const override;
  First first() const override;
  uint64_t done() const override;
  bool needs(int peer) const override;
  bool needsNow(int peer) const override;
  // Closes the connections that still have user memory in hand, unless the owner has closed them
  // before.
  Pending cancelAll() override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchft_ext
