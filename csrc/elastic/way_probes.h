// Of a newcomer: which processes it has to reach before members take it in, and which it has
// reached. It sends each one 64 KiB over the connection that it makes to that one, and gets as much
// back over the connection that the other makes to it: so both ways, through both listeners, for
// packets larger than what a link with too small an MTU lets through. Generations of groups are
// formed between the same addresses.
//
// A value; its owner, a MemberDriver, gives it the time and sends.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "base/deadline.h"
#include "elastic/view.h"

namespace torchft_ext {

class WayProbes {
 public:
  static constexpr std::chrono::seconds kAgain{2};      // where no answer came
  static constexpr std::chrono::seconds kTellAfter{5};  // of the wait; shorter ones are no news

  // Whom to reach, as a member or the meeting place tells. In place of those told before.
  void setTargets(std::set<MemberId> ids) { targets_ = std::move(ids); }
  const std::set<MemberId>& targets() const { return targets_; }
  const std::set<MemberId>& reached() const { return reached_; }
  // Targets that are not reached, of which the probe was sent that long ago, or none was.
  std::vector<MemberId> due(Clock::time_point now) const;
  std::vector<MemberId> unreached() const;

  void sent(const MemberId& id, Clock::time_point now) { sent_at_[id] = now; }
  // False: that is known.
  bool answered(const MemberId& id) { return reached_.insert(id).second; }
  // It is lost, or a connection to or from it has ended. False: it had not been reached.
  bool lose(const MemberId& id);

 private:
  std::set<MemberId> targets_;
  std::set<MemberId> reached_;
  std::map<MemberId, Clock::time_point> sent_at_;
};

}  // namespace torchft_ext
