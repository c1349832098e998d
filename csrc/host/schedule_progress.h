// Where one schedule stands: which steps are done, which may begin. Counts dependencies: O(steps)
// in all.
//
// Owner: whoever runs the schedule (ScheduleRunner, NestedCollectives), one for each operation
// under way. Loop thread only. It moves no bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "host/schedule.h"

namespace torchft_ext {

class ScheduleProgress {
 public:
  static constexpr int kNone = -1;

  ScheduleProgress(Schedule schedule, int size);

  const Step& step(int index) const { return schedule_.steps[static_cast<size_t>(index)]; }
  bool done() const { return undone_ == 0; }
  bool mayBegin(int index) const { return waits_for_[static_cast<size_t>(index)] == 0; }

  // The first step of this kind with this peer that has not been taken; kNone: all have been.
  int nextSend(int peer) const { return peers_[static_cast<size_t>(peer)].sends.front(); }
  int nextReceive(int peer) const { return peers_[static_cast<size_t>(peer)].receives.front(); }
  void takeSend(int peer) { peers_[static_cast<size_t>(peer)].sends.pop(); }
  void takeReceive(int peer) { peers_[static_cast<size_t>(peer)].receives.pop(); }
  // Steps with this peer that are not done.
  size_t undoneWith(int peer) const { return peers_[static_cast<size_t>(peer)].undone; }

  // Steps without a peer that may begin and have not been taken.
  bool hasLocal() const { return !local_.empty(); }
  int takeLocal();

  // The steps with a peer that may begin now are added to *may_begin.
  void finish(int index, std::vector<int>* may_begin);

 private:
  struct Queue {
    std::vector<int> steps;
    size_t next = 0;
    int front() const { return next < steps.size() ? steps[next] : kNone; }
    void pop() { ++next; }
  };
  struct PeerSteps {
    Queue sends;
    Queue receives;
    size_t undone = 0;
  };

  void indexDependents();
  void indexPeers();

  Schedule schedule_;  // never changed
  std::vector<uint8_t> waits_for_;
  // dependents_[first_dependent_[i] .. first_dependent_[i + 1]): the steps that wait for step i.
  std::vector<uint32_t> first_dependent_;
  std::vector<int32_t> dependents_;
  std::vector<PeerSteps> peers_;
  std::vector<int> local_;
  size_t undone_;
};

}  // namespace torchft_ext
