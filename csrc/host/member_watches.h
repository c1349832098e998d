// Operations that move nothing and wait for a member to leave (Operation::watches).
//
// Owner: a HostGeneration. Threads: its loop.
#pragma once

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "comm/op_state.h"

namespace torchft_ext {

class MemberWatches {
 public:
  void add(std::shared_ptr<OpState> watch) { watches_.push_back(std::move(watch)); }
  bool idle() const { return watches_.empty(); }
  // Whether somebody waits who has not been told of this leaver. Each is told of once.
  bool wantToKnow(int leaver) const { return !watches_.empty() && told_.count(leaver) == 0; }
  void tell(int leaver, const FailurePtr& failure) {
    told_.insert(leaver);
    end(failure);
  }
  // The generation is over.
  void end(const FailurePtr& failure) {
    for (const auto& watch : std::exchange(watches_, {})) watch->complete(watch->inPlace(failure));
  }

 private:
  std::vector<std::shared_ptr<OpState>> watches_;
  std::set<int> told_;  // ranks of leavers
};

}  // namespace torchft_ext
