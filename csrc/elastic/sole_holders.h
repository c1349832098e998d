// Members that hold something nobody else has, such as the only copy of a shard: one of them that
// freezes is waited for, since it may come back, and without it the others cannot go on. A value.
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

  // In place of those before. patience: for one that freezes, from when that is first noticed.
  void set(std::set<MemberId> ids, Duration patience);
  // It does not answer, once more.
  Verdict onFrozen(const MemberId& id, Clock::time_point now);
  // It says something.
  void hear(const MemberId& id) { frozen_since_.erase(id); }

  Duration patience() const { return patience_; }
  std::set<MemberId> awaited() const;

 private:
  std::set<MemberId> ids_;
  Duration patience_{};
  std::map<MemberId, Clock::time_point> frozen_since_;
};

}  // namespace torchft_ext
