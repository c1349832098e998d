// Members that hold something nobody else has, such as the only copy of a shard: one of them that
// freezes is waited for, since it may come back, and without it the others cannot go on. A value.
//
// The program names the sole holders of each view. Until it does, every member of the view counts
// as one, if the program has named some before: nobody knows yet what each member holds.
#pragma once

#include <map>
#include <set>

#include "base/deadline.h"
#include "elastic/view.h"

namespace torchft_ext {

class SoleHolders {
 public:
  enum class Verdict {
    kLost,    // others go on without it: it holds nothing of that kind, or its time is up
    kBegins,  // from now on it is waited for
    kWaits,
  };

  // In this view, in place of those before. patience: for one that freezes, from when that is first
  // noticed; it holds in later views too.
  void set(std::set<MemberId> ids, Duration patience);
  void beginView();
  bool has(const MemberId& id) const;
  // It does not answer, once more.
  Verdict onFrozen(const MemberId& id, Clock::time_point now);
  // It answers, or is gone for good: it is not waited for.
  void forget(const MemberId& id) { frozen_since_.erase(id); }

  Duration patience() const { return patience_; }
  // The frozen members that are waited for; and those whose patience has passed.
  std::set<MemberId> awaited() const;
  std::set<MemberId> expired(Clock::time_point now) const;

 private:
  std::set<MemberId> ids_;
  bool all_ = false;  // of the view: the user has not said yet
  Duration patience_{};
  std::map<MemberId, Clock::time_point> frozen_since_;
};

}  // namespace torchft_ext
