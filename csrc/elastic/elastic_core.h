// One member's part in the membership protocol: events in, effects out. It knows no clock, socket
// or thread, and is what the model checker explores. docs/membership_protocol.md has the protocol.
//
// States:
//   kJoining  a newcomer: in no view yet
//   kActive   in a view; agreements go on; a generation may be formed
//   kStopped  has promised to a proposer: the view's agreements and generation are over
//   kLeftOut  a newer view is without it: final
// Owner: an ElasticMember, on its loop. Not thread-safe. Copyable.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "elastic/agreements.h"
#include "elastic/asked_agreements.h"
#include "elastic/elastic_message.h"
#include "elastic/losses.h"
#include "elastic/proposal.h"
#include "elastic/view.h"
#include "elastic/view_decision.h"

namespace torchft_ext {

// What an event brings about. The driver carries it out in this order.
struct ElasticEffects {
  bool stopped = false;                // the view's generation has to fail: now
  std::vector<ElasticEnvelope> sends;  // never to the member itself
  std::optional<WitnessRequest> witness;
  bool new_view = false;            // view() has changed
  bool left_out = false;            // view() is without this member
  std::vector<Outcome> answers;     // agreements of this member that are over
  std::vector<MemberId> no_quorum;  // not empty: these are missing for a quorum
  bool hopeless = false;            // no_quorum: so many are dead that there will be none
  std::string refused;              // not empty: why what was said is not believed
};

class ElasticCore {
 public:
  enum class State : uint8_t { kJoining, kActive, kStopped, kLeftOut };

  // A member of this view (a founder), or a newcomer, which asks these for a place.
  ElasticCore(Member self, ElasticRules rules, View view);
  ElasticCore(Member self, ElasticRules rules, std::vector<MemberId> contacts);

  State state() const { return state_; }
  const View& view() const { return view_; }  // number 0: none yet
  const Member& self() const { return self_; }
  const std::map<MemberId, Loss>& losses() const { return losses_.all(); }
  // Members of the view before that are not in this one: how they were lost, where that is known.
  const std::map<MemberId, Loss>& lostBefore() const { return lost_before_; }
  // Newcomers that ask for a place; and those of them that this member does not hold back.
  std::vector<Member> newcomers() const;
  std::vector<MemberId> waiting() const;
  bool wanted() const { return decision_.isWanted(); }
  // Whose word is awaited: for an agreement, or for a proposal of this member's.
  std::vector<MemberId> unheard() const;
  // Members of the newest view, and newcomers.
  std::set<MemberId> everybody() const;
  const std::optional<AcceptedView>& accepted() const { return decision_.accepted(); }
  Promotion promotion() const { return agreements_.promotion(); }

  ElasticEffects receive(const MemberId& from, const ElasticMessage& message);
  // The driver's word on another member or newcomer.
  ElasticEffects lose(const MemberId& id, Loss loss);
  // The view could not form: these pairs of its members could not connect.
  void cannotReach(const std::set<MemberPair>& pairs) { cut_.insert(pairs.begin(), pairs.end()); }
  // These are to be left out of the next view unless they await it.
  void leaveOut(const std::set<MemberId>& ids) { absent_.insert(ids.begin(), ids.end()); }
  // These newcomers are not to be taken in yet, by this member's word, which its votes and promises
  // carry: the others heed it. In place of those that were told before.
  void holdBack(const std::set<MemberId>& ids) { held_back_ = ids; }
  bool holdsBack(const MemberId& id) const { return held_back_.contains(id); }
  void setLeaving() { leaving_ = true; }
  // The identity of the store to that lineage, as this member finds it: the next view of it may
  // appoint it. Zero: none.
  void setWitness(const Lineage& lineage, const WitnessId& identity) {
    if (lineage == view_.lineage) witness_ = identity;
  }
  // Random, and known to this member alone: from it the secrets of views follow that it proposes.
  // Without a seed they have none.
  void setSeed(const ViewSecret& seed) { seed_ = seed; }
  // An operator's word: this member goes on alone, in another lineage, whatever the others do.
  // Nothing happens to one that is in no view, or left out.
  ElasticEffects beginLineage(const Lineage& lineage);
  // Of a newcomer: whom it asks. False: it has a place, or these are known already.
  bool setContacts(std::vector<MemberId> contacts);
  // Of a newcomer: the processes that it has reached, and that have reached it. Members take it in
  // once it says so of all of them.
  void setReached(const std::set<MemberId>& ids) { reached_ = ids; }
  // Of a newcomer: is none of those whom it asks alive any more?
  bool hasNoContactLeft() const;

  // This member's next agreement in the view with that number, which it has formed. Where that view
  // is over, the answer follows from the next one (at once, if that is known).
  ElasticEffects agree(uint64_t view, Vote vote);
  // The user awaits a view, or forms one: it is not absent.
  void setReady(bool ready) { ready_ = ready; }
  // The shard of a sharded state that its user holds: nobody is left out as absent who may hold the
  // only copy of one.
  void setShard(std::optional<uint32_t> shard) { shard_ = shard; }
  // A view newer than this is wanted.
  ElasticEffects want(uint64_t newer_than);
  // Time has passed: says again what may have been lost, tries again what did not succeed.
  ElasticEffects retry();
  // Asks those whose word on an agreement is missing to say it again: it may have been lost.
  ElasticEffects askAgain();
  // There is a new connection to it: what was said over the one before may be lost.
  ElasticEffects connected(const MemberId& id);
  // The connection from it has ended: what it said there may be lost.
  ElasticEffects disconnected(const MemberId& id);
  ElasticEffects witnessAnswered(const WitnessReply& reply);

  // Has it been left out by a view that it cannot check? It hears and tells nothing any more.
  bool isIsolated() const { return unsealed_; }

  // Of the model checker: equal where the states are.
  std::string fingerprint() const;

 private:
  using Effects = ElasticEffects;

  Agreements makeAgreements() const;
  ElasticMessage make(ElasticKind kind) const;
  void send(Effects& effects, const MemberId& to, ElasticMessage message) const;
  void sendToMembers(Effects& effects, const ElasticMessage& message) const;
  ViewSecret secretOf(const Lineage& lineage, uint64_t number) const;
  bool isInView() const { return state_ == State::kActive || state_ == State::kStopped; }

  std::vector<MemberId> heldBack() const;
  void onPrepare(Effects& effects, const MemberId& from, const ElasticMessage& message);
  void onAccept(Effects& effects, const MemberId& from, const ElasticMessage& message);
  void onJoin(Effects& effects, const ElasticMessage& message);
  void handOverTo(Effects& effects, const Member& newcomer) const;
  bool isApart(const Lineage& lineage) const;
  void onOtherLineage(Effects& effects, const MemberId& from, const ElasticMessage& message) const;
  bool onOtherView(Effects& effects, const MemberId& from, const ElasticMessage& message);

  void stop(Effects& effects);
  Promise promise() const;
  void pursue(Effects& effects);
  void propose(Effects& effects);
  void carryOut(Effects& effects, ViewDecision::Step step);
  void decide(Effects& effects, const View& decided);
  void hearView(Effects& effects, const MemberId& from, const View& view);
  void tellNewcomers(Effects& effects) const;
  const View* knownOf(const View& view) const;
  bool isDecidedWithout(const View& view, const MemberId& id) const;
  bool believes(Effects& effects, const View& value) const;
  void adopt(Effects& effects, const View& view);
  void install(Effects& effects, const View& view);
  void forgetOldView();
  bool wantsWitness() const;
  void tellView(Effects& effects, const std::vector<MemberId>& to, const View& view) const;
  void recoverAgreement();
  bool mayComeByOthers(const MemberId& id, const std::set<MemberId>& lost) const;
  void carryOutAgreement(Effects& effects, Agreements::Step step);
  void answerFromView(Effects& effects);
  void repeatTo(Effects& effects, const MemberId& to);

  Member self_;
  ElasticRules rules_;
  State state_ = State::kJoining;
  View view_;
  std::vector<MemberId> contacts_;
  std::set<MemberId> reached_;
  // Of a newcomer: the last view that it was told and that is without it.
  std::pair<Lineage, uint64_t> seen_;
  Losses losses_;
  std::set<MemberId> before_;  // members of the view before
  std::map<MemberId, Loss> lost_before_;
  std::map<MemberId, Member> waiting_;
  std::set<MemberPair> cut_;
  std::set<MemberId> absent_;
  std::set<MemberId> held_back_;
  WitnessId witness_;
  ViewSecret seed_;
  bool unsealed_ = false;  // left out by a view whose seal nobody checked: it is not passed on
  bool leaving_ = false;
  bool ready_ = false;
  std::optional<uint32_t> shard_;
  ViewDecision decision_;  // on the view after view_
  Agreements agreements_;
  int questions_ = 0;  // asked again in vain, while a lost member's word is missing
  AskedAgreements asked_;
};

}  // namespace torchft_ext
