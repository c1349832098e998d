// Why did a peer's lane end: has its process, or only the connection? Once per peer, whichever of
// its lanes ends first.
//
// States of a peer: untouched; waiting, where the collective lane ended and the control lane may
// still bring last words, which are behind it; asked, a Probe is under way; and the verdict is
// given, once. Destroyed: nothing is given any more.
//
// Loop thread only. The verdict runs on the loop, from laneEnded() or later; it may destroy the
// LinkJudge.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "host/mesh.h"
#include "net/event_loop.h"
#include "net/probe.h"
#include "rendezvous/records.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

class LinkJudge {
 public:
  using Verdict = std::function<void(int rank, FailureKind kind, const std::string& how)>;

  LinkJudge(EventLoop& loop, const Roster& roster, Verdict verdict);  // the roster outlives it
  ~LinkJudge();
  LinkJudge(const LinkJudge&) = delete;
  LinkJudge& operator=(const LinkJudge&) = delete;

  void laneEnded(int rank, Lane lane);

 private:
  struct Case {
    EventLoop::TimerId timer = 0;  // waiting
    std::unique_ptr<Probe> probe;  // asked
  };

  void ask(int rank);
  void onAnswer(int rank, Probe::Answer answer, const std::string& detail);

  EventLoop& loop_;
  const Roster& roster_;
  const Verdict verdict_;
  std::map<int, Case> cases_;
};

}  // namespace torchft_ext
