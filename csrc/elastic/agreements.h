// The agreements of one view, as one member sees them: two rounds each, no aggregator.
//
// States of a member in agreement k: not voted -> voted -> completed A (all votes are here) ->
// returned (all members have said that they completed A). stop() ends all of it for good: a
// proposer has been promised that. Pure; owner: an ElasticCore, which is its only user.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "elastic/elastic_message.h"
#include "elastic/view.h"

namespace torchft_ext {

class Agreements {
 public:
  // What to do after an event, in this order.
  struct Step {
    std::vector<ElasticMessage> to_all;  // kind, index and vote are set
    std::optional<Outcome> returned;     // its view is not set
  };

  Agreements() = default;
  Agreements(MemberId self, const std::vector<Member>& members, bool second_round = true);

  // The index of this member's next agreement.
  uint64_t next() const { return mine_ + 1; }
  // Has it voted and not returned?
  bool pending() const;
  Step vote(const Vote& vote);
  Step hear(const MemberId& from, const ElasticMessage& message);  // kVote, kCompleted
  // Has it heard the votes of all members but these?
  bool hasVotesOfAllBut(const std::set<MemberId>& gone) const;
  // Is something of its that is missing for this member to return?
  bool awaits(const MemberId& other) const;
  // Everything that this member has said and others may have missed.
  std::vector<ElasticMessage> saidSoFar() const;

  void stop() { stopped_ = true; }
  bool stopped() const { return stopped_; }
  // After stop(): what a proposer has to know.
  std::vector<AgreementReport> reports() const;
  Promotion promotion() const;

  // Of the model checker: equal where the states are.
  std::string fingerprint() const;

  // Of an agreement whose votes these are.
  static Answer answerOf(const std::map<MemberId, Vote>& votes);

 private:
  struct Round {
    std::map<MemberId, Vote> votes;
    std::set<MemberId> completed;
    std::optional<Answer> answer;  // this member completed A
    bool returned = false;
  };
  Step advance();

  MemberId self_;
  std::set<MemberId> members_;
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
