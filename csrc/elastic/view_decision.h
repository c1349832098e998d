// One member's part in deciding on the view after its own: what it has promised and accepted, whose
// turn it is to propose, and its own proposals, one after the other. A Proposal counts the votes of
// one ballot; here is what it says to the others, and what becomes of it.
//
// A value; a new one for each view. Pure; owner: an ElasticCore, its only user.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "elastic/elastic_message.h"
#include "elastic/losses.h"
#include "elastic/proposal.h"
#include "elastic/view.h"
#include "elastic/view_acceptor.h"

namespace torchft_ext {

class ViewDecision {
 public:
  // What to do, in this order.
  struct Step {
    std::vector<ElasticEnvelope> sends;
    std::optional<WitnessRequest> witness;
    std::vector<MemberId> no_quorum;  // not empty: these are missing for a quorum
    bool hopeless = false;            // no_quorum: so many are dead that there will be none
    std::optional<View> decided;
  };

  // ---- whose turn it is
  bool isWanted() const { return wanted_; }
  void want() { wanted_ = true; }
  // Time has passed without a view.
  void noteFruitless() {
    if (wanted_) ++fruitless_;
  }
  // Who is to propose, by the living of `view`: this member, or another one to be asked. Nothing:
  // no view is wanted, or this member proposes already.
  std::optional<MemberId> proposer(const View& view, const Losses& losses) const;
  // Has this member promised to another that may still be at it?
  bool followsAnother(const MemberId& self, const Losses& losses) const;

  // ---- as an acceptor
  const Ballot& promised() const { return acceptor_.promised(); }
  const std::optional<AcceptedView>& accepted() const { return acceptor_.accepted(); }
  // False: it has promised to a higher ballot. A lower proposal of its own is over.
  bool promise(const Ballot& ballot);
  bool accept(const Ballot& ballot, const View& value);
  // Another has promised to that ballot.
  void refused(const Ballot& ballot);

  // ---- as the proposer
  // Null: this member proposes nothing.
  const Proposal* proposal() const { return proposal_ ? &*proposal_ : nullptr; }
  // Above all that it has heard of; it has promised to it.
  Ballot nextBallot(const MemberId& self) { return acceptor_.nextBallot(self); }
  // In the place of an earlier one. own: this member's promise.
  Step propose(Proposal proposal, const Promise& own, const Losses& losses);
  Step promised(const MemberId& from, const Ballot& ballot, const Promise& promise,
                const Losses& losses);
  Step accepted(const MemberId& from, const Ballot& ballot, const Losses& losses);
  Step witnessAnswered(const WitnessReply& reply, const Losses& losses);
  // Others may be gone, or back.
  Step lookAgain(const Losses& losses);
  // Says again what may be lost.
  Step repeat(const Losses& losses);
  // What the others are asked by now; there is a proposal.
  ElasticMessage question() const;
  // Is one that promised lost before it has accepted? Then the proposal cannot end as it began.
  bool hasLostAcceptors(const Losses& losses) const;

  // Of the model checker: equal where the states are.
  std::string fingerprint() const;

 private:
  void follow(Step& step, Proposal::Step next, const Losses& losses);
  void acceptOwn(Step& step, const Losses& losses);
  void reportNoQuorum(Step& step, const Losses& losses) const;
  bool isAccepting() const;
  void ask(Step& step, const Losses& losses) const;
  void endBelow(const Ballot& ballot);
  const MemberId& self() const { return proposal_->ballot().proposer; }

  ViewAcceptor acceptor_;
  std::optional<Proposal> proposal_;
  bool wanted_ = false;
  uint32_t fruitless_ = 0;  // retries without a new view
};

}  // namespace torchft_ext
