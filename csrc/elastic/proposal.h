// One ballot of one proposer for the view after `base`: what it has heard, and what comes next.
//
// States: preparing -> (reading the witness -> claiming it ->) accepting -> decided; or without a
// quorum, until more is heard. Pure; owner: an ElasticCore, its only user. Why the witness comes
// before the members: docs/membership_protocol.md.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "elastic/elastic_message.h"
#include "elastic/quorum.h"
#include "elastic/view.h"

namespace torchft_ext {

// The parts of the protocol that the model checker takes out one by one, to see that each is
// missed.
struct ElasticParts {
  bool witness_first = true;         // it claims before members are asked to accept
  bool second_round = true;          // of agreements
  bool stop_at_promise = true;       // no agreement goes on beside a proposal
  bool learners_watch = true;        // they do not decide before they are promoted
  bool lineages_apart = true;        // what another lineage says is not heard
  bool witness_is_the_views = true;  // a store of another identity has no vote
  bool digests_count = true;         // answers are not ok where those of the votes differ
  bool ready_are_enough = true;      // absent members are left out only where the others suffice
  // In views of more members agreements are relayed (spread.h). Up to here the hops would cost more
  // than the messages that they spare; the model checker's worlds are small, and relay all the
  // same.
  size_t most_tell_directly = 4;
};

// Fixed at a job's founding.
struct ElasticRules {
  bool store_rule = false;  // the store decides, with min_size members; else the members' quorum
  int min_size = 1;
  int max_size = 65536;
  ElasticParts parts;
  // Of the view after `base`: a view that names no store leaves it to its members.
  bool storeDecidesAfter(const View& base) const { return store_rule && !base.witness.isZero(); }
};

// What a store is asked for, on behalf of this ballot.
struct WitnessRequest {
  enum class What { kRead, kClaim, kDecide };
  What what = What::kRead;
  Lineage lineage;
  uint64_t number = 0;  // of the view that is to be decided
  WitnessId identity;
  Ballot ballot;
  // kClaim: what the witness held when it was read, which has to stand there still; nothing: of
  // this number it held nothing.
  std::optional<AcceptedView> expected;
  std::optional<View> view;  // kClaim, kDecide
};

struct WitnessReply {
  WitnessRequest::What what = WitnessRequest::What::kRead;
  Lineage lineage;
  uint64_t number = 0;
  Ballot ballot;
  bool has_vote = false;  // it answered, after that is the one of that identity, of no later number
  bool claimed = false;   // kClaim
  std::optional<AcceptedView> held;  // kRead; kClaim that was not: what it holds of this number
  std::optional<View> decided;       // kDecide: the first that was written
  std::optional<View> later;         // no vote: what it holds of a later number
};

class Proposal {
 public:
  enum class Stage { kPreparing, kReading, kClaiming, kAccepting, kDeciding };
  // What to do next.
  struct Step {
    bool accept = false;  // tell all to accept value()
    std::optional<WitnessRequest> witness;
    bool decided = false;  // value() is the next view
    bool over = false;     // this ballot can come to nothing: another one is needed
    bool no_quorum = false;
  };

  // secret: of the next view, where nothing binds its value.
  Proposal(const View& base, ElasticRules rules, Ballot ballot, ViewSecret secret)
      : base_(base), rules_(rules), ballot_(ballot), secret_(secret) {}

  const View& base() const { return base_; }
  const Ballot& ballot() const { return ballot_; }
  Stage stage() const { return stage_; }
  const View& value() const { return *value_; }
  bool hasPromised(const MemberId& id) const { return promises_.contains(id); }
  bool hasAccepted(const MemberId& id) const { return accepted_by_.contains(id); }

  // gone: members that are known to be dead, frozen or cut off, as of now.
  Step promised(const MemberId& from, const Promise& promise, const std::set<MemberId>& gone);
  Step accepted(const MemberId& from);
  // Would the proposer's own acceptance decide? It accepts last, so that a member that dies
  // meanwhile binds nobody.
  bool needsOnly(const MemberId& own) const;
  Step witnessAnswered(const WitnessReply& reply, const std::set<MemberId>& gone);
  // If all of these took part, would there be a quorum? Or may the store hold the decision?
  bool couldDecide(const std::set<MemberId>& voices) const;
  // Others may be gone, or back.
  Step lookAgain(const std::set<MemberId>& gone);
  // The witness's request that is not answered yet, to be repeated.
  std::optional<WitnessRequest> pendingRequest() const;

  // Of the model checker: equal where the states are.
  std::string fingerprint() const;

 private:
  bool storeDecides() const { return rules_.storeDecidesAfter(base_); }
  bool isQuorum(const std::set<MemberId>& voices) const;
  QuorumState quorum(const std::set<MemberId>& voices) const;
  bool enoughForStore(const std::set<MemberId>& voices) const;
  void choose(const std::set<MemberId>& gone);
  Step ask(WitnessRequest::What what) const;
  Step storeAnswered(const WitnessReply& reply);
  Step storeDecided(const WitnessReply& reply);
  Step witnessHasNoVote();
  std::vector<std::vector<MemberId>> acceptors() const;
  Step afterPromises(const std::set<MemberId>& gone);
  Step startAccepting();

  View base_;
  ElasticRules rules_;
  Ballot ballot_;
  ViewSecret secret_;
  Stage stage_ = Stage::kPreparing;
  std::map<MemberId, Promise> promises_;
  std::set<MemberId> accepted_by_;
  std::optional<AcceptedView> held_;  // by the witness
  bool witness_claimed_ = false;
  bool store_is_empty_ = false;  // by the store's rule: it was read, and has not decided
  std::optional<View> value_;
};

}  // namespace torchft_ext
