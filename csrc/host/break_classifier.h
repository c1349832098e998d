// Why did a peer's channel end: has its process, or only the connection? Once per peer, whichever
// of its channels ends first.
//
// States of a peer: untouched; waiting, where the collective channel ended and the control channel
// may still bring final frames, which are behind it; asked, a Probe is under way; and the result is
// given, once. Forgotten, or all of it destroyed: nothing is given any more.
//
// Owner: HostGeneration. Loop thread only. The result runs on the loop, from channelEnded() or
// later; it may destroy the BreakClassifier.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "host/mesh.h"
#include "membership/records.h"
#include "net/event_loop.h"
#include "net/probe.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

class BreakClassifier {
 public:
  using OnResult = std::function<void(int rank, FailureKind kind, const std::string& how)>;

  // the roster outlives it
  BreakClassifier(EventLoop& loop, const Roster& roster, OnResult result);
  ~BreakClassifier();
  BreakClassifier(const BreakClassifier&) = delete;
  BreakClassifier& operator=(const BreakClassifier&) = delete;

  void channelEnded(int rank, Channel channel);
  void forget(int rank);  // it has said why

 private:
  struct Case {
    EventLoop::TimerId timer = 0;  // waiting
    std::unique_ptr<Probe> probe;  // asked
  };

  void ask(int rank);
  void onAnswer(int rank, const ProbeAnswer& answer);

  EventLoop& loop_;
  const Roster& roster_;
  const OnResult on_result_;
  std::map<int, Case> cases_;
};

}  // namespace torchft_ext
