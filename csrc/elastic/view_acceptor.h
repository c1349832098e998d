// What one member has promised and accepted for the view after its own. A value; a new one for each
// view.
#pragma once

#include <algorithm>
#include <optional>

#include "elastic/view.h"

namespace torchft_ext {

class ViewAcceptor {
 public:
  const Ballot& promised() const { return promised_; }
  const std::optional<AcceptedView>& accepted() const { return accepted_; }
  uint32_t highestRound() const { return highest_round_; }

  // A round that somebody has used.
  void hear(uint32_t round) { highest_round_ = std::max(highest_round_, round); }
  // False: it has promised to a higher ballot.
  bool promise(const Ballot& ballot) {
    hear(ballot.round);
    if (ballot < promised_) return false;
    promised_ = ballot;
    return true;
  }
  bool accept(const Ballot& ballot, const View& value) {
    if (!promise(ballot)) return false;
    accepted_ = {ballot, value};
    return true;
  }
  // The member's own, above all that it has heard of; it has promised to it.
  Ballot nextBallot(const MemberId& self) {
    promised_ = {++highest_round_, self};
    return promised_;
  }

 private:
  Ballot promised_;
  std::optional<AcceptedView> accepted_;
  uint32_t highest_round_ = 0;
};

}  // namespace torchft_ext
