// Runs the collectives that callbacks have issued (comm/callback_path.h): beside the threads' order
// and beside each other, each by its own schedule.
//
// Their steps go as messages over the control channels, under the operation's name: a step's bytes
// travel once its receiver has asked for them. So an operation that one rank has not issued yet
// holds up no channel, and one needs nothing of the others but that all ranks issue it. They do
// where all ranks' programs are the same: the collective above it in the path completes on each
// rank whatever is issued later, and its callbacks then begin, since threads of callbacks that wait
// are replaced (comm/callback_pool.h). Where a program differs, the operation's limit ends it.
//
// Ranks that issue different operations under one name fail the generation with kMismatch.
//
// Loop thread only. Owner: HostGeneration, whose messages outlive it. cancelAll()
// leaves every buffer untouched from then on and completes nothing: it returns what was pending;
// the control channels have been let go before.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/op_state.h"
#include "host/messages.h"
#include "host/schedule.h"

namespace torchft_ext {

class NestedCollectives {
 public:
  NestedCollectives(int rank, int size, Messages& messages, ScheduleTuning tuning,
                    Messages::Callbacks callbacks);
  ~NestedCollectives();

  void add(std::shared_ptr<OpState> state, Operation operation);  // with a name
  bool idle() const;
  bool needs(int peer) const;  // a pending one has something to receive from or send to this peer
  std::vector<std::pair<std::shared_ptr<OpState>, Operation>> cancelAll();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchft_ext
