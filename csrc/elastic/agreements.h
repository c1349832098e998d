// The agreements of one view, as one member sees them: two rounds each, no aggregator.
//
// States of a member in agreement k: not voted -> voted -> completed A (all votes are here) ->
// returned (all members have said that they completed A). stop() ends all of it for good: a
// proposer has been promised that. Pure; owner: an ElasticCore, which is its only user.
//
// How a round spreads is said by *hops* (spread.h): each member tells some others what it knows of
// some members, once it knows it. What is told are facts that stay true, so it does not matter who
// tells them, in which order, or how often.
//
// Who loses another one tells so, and from then on each tells each directly. If only the connection
// between the two is *cut*, whoever knows of it passes on what the one says to the other.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "elastic/elastic_message.h"
#include "elastic/spread.h"
#include "elastic/view.h"

namespace torchft_ext {

class Agreements {
 public:
  // What to do after an event, in this order.
  struct Step {
    std::vector<ElasticEnvelope> sends;
    std::optional<Outcome> returned;
  };

  Agreements() = default;
  // may_relay: in this view members pass on what others said; a lost one then breaks the chain,
  // until tellDirectly(). Else each tells each, and nobody is heard about another one.
  Agreements(MemberId self, const View& view, bool may_relay, bool second_round = true);

  // The index of this member's next agreement.
  uint64_t next() const { return mine_ + 1; }
  // Has it voted and not returned?
  bool pending() const;
  Step vote(const Vote& vote);
  Step hear(const MemberId& from, const ElasticMessage& message);  // kVote, kCompleted
  // Somebody is lost who may not pass on what it was told: from now on each tells each.
  Step tellDirectly();
  // Nothing comes from that member to this one; it may live, and others may hear it.
  Step lose(const MemberId& other);
  // Is there one, not gone and not known to have lost it too, that may pass on what it says?
  bool mayPassOn(const MemberId& lost, const std::set<MemberId>& gone) const;
  // Has it heard the votes of all members but these?
  bool hasVotesOfAllBut(const std::set<MemberId>& gone) const;
  // Is something of its that is missing for this member to return?
  bool awaits(const MemberId& other) const;
  // Everything that this member knows and others may have missed.
  std::vector<ElasticMessage> saidSoFar() const;

  void stop() { stopped_ = true; }
  bool stopped() const { return stopped_; }
  // After stop(): what a proposer has to know.
  std::vector<AgreementReport> reports() const;
  Promotion promotion() const;

  // Of the model checker: equal where the states are.
  std::string fingerprint() const;

  // Of an agreement whose votes these are. All that judge one ask here.
  static Answer answerOf(const std::map<MemberId, Vote>& votes);

 private:
  struct Round {
    std::map<MemberId, Vote> votes;
    std::set<MemberId> completed;
    std::optional<Answer> answer;  // this member completed A
    bool returned = false;
    std::vector<bool> votes_told;  // by hop
    std::vector<bool> completed_told;
  };
  Step advance();
  void chart();
  Step tellAnew();
  void hearCut(const ElasticMessage& message, Step& step);
  void tell(uint64_t index, Round& round, Step& step) const;
  ElasticMessage make(ElasticKind kind, uint64_t index) const;

  MemberId self_;
  Lineage lineage_;
  uint64_t view_ = 0;
  std::vector<MemberId> ranks_;
  std::set<MemberId> members_;
  std::vector<Hop> hops_;
  bool may_relay_ = false;
  bool relayed_ = false;
  std::set<MemberPair> cut_;  // the one has lost the other; not all, once there are too many
  bool second_round_ = true;
  std::map<uint64_t, Round> rounds_;  // mine_ - 1 to mine_ + 1
  uint64_t mine_ = 0;                 // the last one in which this member has voted
  bool stopped_ = false;
  bool returned_ok_ = false;  // from any of this view
};

// The outcomes of a view's agreements, where those who stopped report this: for each agreement, the
// answer of one that has it, else the AND of their votes, where a missing one is a no.
std::vector<Outcome> outcomesOf(uint64_t view,
                                const std::map<MemberId, std::vector<AgreementReport>>& reports);

}  // namespace torchft_ext
