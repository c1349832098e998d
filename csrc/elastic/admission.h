// Which newcomers a member holds back: it asks the others not to take them in yet
// (ElasticCore::holdBack()). A view that is decided with a newcomer that cannot connect to another
// member comes to nothing, and costs all members the time of an attempt. So a newcomer first probes
// the way to each of them (way_probes.h), and is held back until it says that it has reached all.
//
// A link may break later. Then the newcomer is left out, and its process may come again at once,
// under another id. So what counts is where it runs: hosts are told apart by the address at which
// their processes listen. A link that comes and goes would cost a view each time: so it counts as
// cut when it breaks again soon.
//
// A value; its owner, a MemberDriver, gives it the time.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "elastic/view.h"

namespace torchft_ext {

class Admission {
 public:
  // So long nobody is taken in, after a view came to nothing, whom that view's cut link concerns.
  static constexpr std::chrono::seconds kBackoff{60};
  // All members of two hosts lose each other within this time of a break.
  static constexpr std::chrono::seconds kOneBreak{5};

  explicit Admission(Duration backoff) : backoff_(backoff) {}

  // A view came to nothing, since these two members could not connect. The hosts, for messages;
  // empty: nothing follows, as they are on one host, or that is known already.
  std::string couldNotConnect(const Member& one, const Member& other, Clock::time_point now);

  // The one could reach the other, and cannot any more. The second time within the backoff it is as
  // if they could not connect: the link comes and goes.
  std::string hasBroken(const Member& one, const Member& other, Clock::time_point now);

  // By the newcomer's word.
  void hasReached(const MemberId& newcomer, const std::set<MemberId>& ids) {
    reached_[newcomer] = ids;
  }
  // The newcomers to hold back now. members: those of the view that are not lost. Of two newcomers
  // that must not be taken in together it is the one with the higher id.
  std::set<MemberId> heldBack(const std::vector<Member>& members,
                              const std::vector<Member>& newcomers, Clock::time_point now);

 private:
  using HostPair = std::pair<std::string, std::string>;  // the lesser first
  // Nothing: on one host, or one that nobody reaches.
  static std::optional<HostPair> twoHosts(const Member& one, const Member& other);
  std::string keepApart(const HostPair& hosts, Clock::time_point now);
  bool haveMet(const MemberId& newcomer, const MemberId& other) const;

  const Duration backoff_;
  std::map<HostPair, Clock::time_point> until_;
  std::map<HostPair, Clock::time_point> broke_at_;
  std::map<MemberId, std::set<MemberId>> reached_;  // by newcomers
};

}  // namespace torchft_ext
