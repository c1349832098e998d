// The ordered collectives of a generation, as it knows them: one queue, in the order of issue. Over
// sockets ScheduleRunner runs them, in the memory of one host SharedLane.
//
// Owner: HostGeneration. Threads: loop only, but where a class says more. It never blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "comm/op_state.h"
#include "comm/operation.h"

namespace torchft_ext {

class Collectives {
 public:
  using Pending = std::vector<std::pair<std::shared_ptr<OpState>, Operation>>;

  virtual ~Collectives() = default;
  // Exchange number n of the generation has index n on every rank; most collectives are one.
  virtual void add(std::shared_ptr<OpState> state, Operation operation) = 0;
  virtual bool idle() const = 0;
  // The oldest that is not complete; its state is null: there is none. Those behind it wait for it.
  struct First {
    std::shared_ptr<OpState> state;
    int root = 0;
  };
  virtual First first() const = 0;
  virtual uint64_t done() const = 0;  // exchanges; the next one, or the running one, has this index
  // A pending operation cannot be completed without that peer; or the running one.
  virtual bool needs(int peer) const = 0;
  virtual bool needsNow(int peer) const = 0;
  // A peer has done so many exchanges, and does no more.
  virtual void peerLeft(int /*peer*/, uint64_t /*exchanges*/) {}
  // The owner wants to hear when so many have been done here.
  virtual void watchFor(uint64_t /*exchanges*/) {}
  // Nothing touches user memory any more, but for a thread that executes at this moment: that one
  // completes what it had begun. Completes nothing itself: returns what was pending.
  virtual Pending cancelAll() = 0;
};

}  // namespace torchft_ext
